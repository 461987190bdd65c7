"""Stochastic quantization: 2 s + 1 levels a bucket, unbiased.

    Q(x)_i = N sgn(x_i) xi_i,   xi_i = l / s with probability l + 1 - s |x_i| / N, else (l + 1) / s
                                l = floor(s |x_i| / N)

N is the bucket's norm, l2 or l_inf. With l2, E ||Q(v) - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2 for buckets of d.

Wire format: each bucket's N as float32 (`mpicomp.codecs.bucketed`), then codes of ceil(log2(2 s + 1)) bits as bit
planes: plane j, ceil(n / 64) words, has bit j of each code. A code is the level, with the sign (1: negative) as the
highest bit.

With entropy coding the codes are symbols, 0 to s and, below zero, s + level; right behind the norms stands the length
of what follows, little-endian, in as few bytes as the longest message of n symbols needs, then the message of
`mpicomp.codecs.rans`.

References: QSGD (Alistarh et al., NIPS 2017); ECQ-SGD (Wu et al., ICML 2018); TernGrad (Wen et al., NIPS 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs import rans
from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.codecs.bucketed import Bucketed, count, finite, norms, to_float32
from mpicomp.codecs.options import choice, integer
from mpicomp.kernels.cpu.planes import pack_planes, powers_of_two, unpack_planes
from mpicomp.kernels.cpu.quantizer import TILE, dequantize, quantize

MOST_LEVELS = 127
_POWERS = powers_of_two(8, np.uint8)


@dataclass(frozen=True, slots=True)
class Quantizer(Bucketed):
    """Randomized quantization of float32 or float64 values.

    Parameters
    ----------
    bucket : int
        Elements that share a norm.
    levels : int
        s, 1 to 127.
    norm : "l2" or "linf"
    coding : "fixed" or "entropy"
        Codes of ceil(log2(2 s + 1)) bits, or as many bits as their entropy, of each message apart.
    """

    levels: int = 4
    norm: Literal["l2", "linf"] = "linf"
    coding: Literal["fixed", "entropy"] = "fixed"

    def __post_init__(self) -> None:
        Bucketed.__post_init__(self)
        integer(self, "levels", 1, MOST_LEVELS)
        choice(self, "norm", ("l2", "linf"))
        choice(self, "coding", ("fixed", "entropy"))

    @property
    def bits(self) -> int:
        """ceil(log2(2 s + 1))."""
        return self.levels.bit_length() + 1

    def nbytes(self, n: int, weight: int = 1) -> int:
        """Exact size of fixed codes; the most that others may take."""
        if self.coding == "fixed":
            return Bucketed.nbytes(self, n, weight)
        return -(-(self._length(n).stop + rans.most_bytes(n, self._symbols)) // 8) * 8 if n else 0

    def used(self, payload: Bytes, n: int) -> int:
        """Bytes of a payload of `n` elements that need be sent."""
        if self.coding == "fixed" or not n:
            return payload.size
        length = self._length(n)
        return min(length.stop + int.from_bytes(payload[length.start : length.stop].tobytes(), "little"), payload.size)

    def _length(self, n: int) -> range:
        """Bytes of a payload that hold how long the message of `n` symbols behind them is."""
        start = 4 * count(n, self.bucket)
        return range(start, start + -(-rans.most_bytes(n, self._symbols).bit_length() // 8))

    @property
    def _symbols(self) -> int:
        return 2 * self.levels + 1

    @property
    def _negative(self) -> int:
        """See `mpicomp.kernels.cpu.quantizer`."""
        return 1 << (self.bits - 1) if self.coding == "fixed" else self.levels

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Draw each element's level. Raises ValueError if a value is not finite."""
        self.pack(*self._drawn(values, draw), payload)

    def encode_telling(self, values: NDArray[Any], payload: Bytes, sent: NDArray[Any], *, draw: Draw) -> None:
        """See `Extended`. Raises ValueError if a value is not finite."""
        codes, scales = self._drawn(values, draw)
        self.pack(codes, scales, payload)
        self._values(codes, scales, sent)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write N l / s for each element; a damaged norm that is not finite counts as 0."""
        codes = np.empty(values.size, np.uint8)
        if self.coding == "fixed":
            (scales,), planes = self._read(payload, values.size, weight)
            unpack_planes(planes, _POWERS, codes)
        else:
            check_size(self, payload, values.size, weight)
            scales = payload[: 4 * count(values.size, self.bucket)].view(np.float32)
            if values.size:
                message = payload[self._length(values.size).stop : self.used(payload, values.size)]
                rans.decode(message, self._symbols, codes)
        self._values(codes, finite(scales), values)

    def _values(self, codes: NDArray[np.uint8], scales: NDArray[np.float32], out: NDArray[Any]) -> None:
        dequantize(codes, self.bucket, scales, self.levels, self._negative, out)

    def _drawn(self, values: NDArray[Any], draw: Draw) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Codes, and N of each bucket."""
        scales = self.scales(values)
        return self.codes(values, scales, draw), scales

    def scales(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """N of each bucket."""
        return to_float32(norms(values, self.bucket, self.norm), values)

    def codes(self, values: NDArray[Any], scales: NDArray[np.float32], draw: Draw) -> NDArray[np.uint8]:
        """Code of each element, given N of each bucket."""
        codes, step = np.empty(values.size, np.uint8), np.uint64(draw.step & 0xFFFFFFFF)
        at = np.uint64(draw.offset), step, draw.source
        work = np.empty(TILE // 2, np.uint64)
        quantize(draw.stream.schedule(), *at, values, self.bucket, scales, self.levels, self._negative, work, codes)
        return codes

    def pack(self, codes: NDArray[np.uint8], scales: NDArray[np.float32], payload: Bytes) -> None:
        """Overwrite the payload."""
        if self.coding == "fixed":
            pack_planes(codes, _POWERS, self._write(payload, codes.size, scales))
            return
        check_size(self, payload, codes.size, 1)
        if codes.size:
            payload[: scales.nbytes].view(np.float32)[:] = scales
            length = self._length(codes.size)
            used = rans.encode(codes, self._symbols, payload[length.stop :])
            written = used.to_bytes(len(length), "little")
            payload[length.start : length.stop] = np.frombuffer(written, np.uint8)
            payload[length.stop + used :] = 0


@dataclass(frozen=True, slots=True)
class Ternary(Quantizer):
    """Ternary quantization that keeps the bucket's length; biased.

    Signs with probability |x_i| / ||x||_inf, times ||x||_2 / sqrt(number of signs); zeros if none is drawn.

    Reference: the ternary QSGD that DoubleSqueeze (Tang et al., ICML 2019) is compared with.
    """

    levels: int = 1
    norm: Literal["l2", "linf"] = "linf"

    def __post_init__(self) -> None:
        Quantizer.__post_init__(self)
        choice(self, "levels", (1,))
        choice(self, "norm", ("linf",))

    def _drawn(self, values: NDArray[Any], draw: Draw) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """See `Quantizer`; the scales are not those that levels were drawn by."""
        codes = self.codes(values, self.scales(values), draw)
        drawn = np.add.reduceat(codes != 0, np.arange(0, codes.size, self.bucket)) if codes.size else np.zeros(0)
        found = norms(values, self.bucket, "l2") / np.sqrt(np.maximum(drawn, 1))
        return codes, to_float32(found, values)
