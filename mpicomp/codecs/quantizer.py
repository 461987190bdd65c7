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

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs import rans
from mpicomp.codecs.base import Bytes, Draw, check_size, checked
from mpicomp.codecs.bucketed import Bucketed, all_finite, confirmed, count, kind_of, norms, to_float32
from mpicomp.codecs.options import choice, integer
from mpicomp.kernels.cpu.quantizer import POWERS

MOST_LEVELS = 127


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

    @property
    def fixed(self) -> Quantizer:
        """With fixed codes: what devices work with, which do no entropy coding."""
        return replace(self, coding="fixed")

    def encode(self, values: Any, payload: Bytes, *, draw: Draw) -> Any:
        """Draw each element's level. Raises ValueError if a value is not finite."""
        return self._encode(values, payload, None, draw)

    def encode_telling(self, values: Any, payload: Bytes, sent: Any, *, draw: Draw) -> Any:
        """See `Extended`. Raises ValueError if a value is not finite."""
        return self._encode(values, payload, sent, draw)

    def encode_scaled(self, values: Any, scales: Any, payload: Bytes, *, draw: Draw) -> None:
        """As `encode` to fixed codes, given N of each bucket; raises nothing."""
        self._write_codes(values, payload, None, draw, scales)

    def _encode(self, values: Any, payload: Bytes, sent: Any, draw: Draw) -> Any:
        if self.coding == "fixed":
            return checked(confirmed(self._write_codes(values, payload, sent, draw), values))
        return self._encode_drawn(values, payload, sent, draw)

    def _write_codes(self, values: Any, payload: Bytes, sent: Any, draw: Draw, scales: Any = None) -> Any:
        """Overwrite a payload of fixed codes in one pass; returns whether the buckets' norms are finite."""
        kernel = kernels.beside(values).quantizer
        (numbers,), planes = self._write(payload, len(values))
        norm: int | None = kind_of(self.norm)
        if scales is not None:
            numbers[:], norm = scales, None
        work, by = np.empty(kernel.WORDS, np.uint64), (self.levels, self._negative)
        return kernel.encode(*_counters(draw), values, self.bucket, norm, numbers, *by, work, sent, planes)

    def _encode_drawn(self, values: Any, payload: Bytes, sent: Any, draw: Draw) -> Any:
        codes, scales, finite = self._drawn(values, draw)
        self.pack(codes, scales, payload)
        if sent is not None:
            self._values(codes, scales, sent)
        return finite

    def decode(self, payload: Bytes, values: Any, *, weight: int) -> None:
        """Write N l / s for each element; a damaged norm that is not finite counts as 0."""
        self._spread(payload, values, weight, adding=False)

    def add(self, payload: Bytes, sums: Any) -> None:
        """Add what `decode` would write to `sums`. Raises ValueError for a wrong size."""
        self._spread(payload, sums, 1, adding=True)

    def _spread(self, payload: Bytes, out: Any, weight: int, adding: bool) -> None:
        if self.coding == "entropy":
            self._values(*self._unpacked(payload, len(out), weight), out, adding)
            return
        (scales,), planes = self._read(payload, len(out), weight)
        kernel = kernels.beside(out).quantizer
        work = np.empty(kernel.WORDS, np.uint64)
        kernel.decode(planes, self.bucket, scales, self.levels, self._negative, work, out, adding)

    def to_fixed(self, payload: Bytes, n: int, fixed: Bytes) -> None:
        """Overwrite a payload of fixed codes with what a payload of `n` elements holds; both are the host's."""
        codes, scales = self._unpacked(payload, n, 1)
        other = self.fixed
        other.pack(_recoded(codes, self.levels, other._negative - self._negative), scales, fixed)

    def from_fixed(self, fixed: Bytes, n: int, payload: Bytes) -> None:
        """The opposite of `to_fixed`."""
        other = self.fixed
        codes, scales = other._unpacked(fixed, n, 1)
        self.pack(_recoded(codes, self.levels, self._negative - other._negative), scales, payload)

    def _unpacked(self, payload: Bytes, n: int, weight: int) -> tuple[Any, Any]:
        """Codes, and N of each bucket, as they came."""
        on = kernels.beside(payload)
        codes = on.arrays.empty(payload, n, "uint8")
        if self.coding == "fixed":
            (scales,), planes = self._read(payload, n, weight)
            on.planes.unpack_planes(planes, POWERS, codes)
            return codes, scales
        check_size(self, payload, n, weight)
        if n:
            rans.decode(payload[self._length(n).stop : self.used(payload, n)], self._symbols, codes)
        return codes, payload[: 4 * count(n, self.bucket)].view(np.float32)

    def _values(self, codes: Any, scales: Any, out: Any, adding: bool = False) -> None:
        dequantize = kernels.beside(out).quantizer.dequantize  # a scale that is not finite counts as 0
        dequantize(codes, self.bucket, scales, self.levels, self._negative, out, adding)

    def _drawn(self, values: Any, draw: Draw) -> tuple[Any, Any, Any]:
        """Codes, N of each bucket, and whether all values are finite."""
        scales, finite = self._scaled(values)
        return self.codes(values, scales, draw), scales, finite

    def scales(self, values: Any) -> Any:
        """N of each bucket. Raises ValueError if a value is not finite."""
        return self._scaled(values)[0]

    def _scaled(self, values: Any) -> tuple[Any, Any]:
        """N of each bucket, and whether all values are finite."""
        found = norms(values, self.bucket, self.norm)
        return to_float32(found), checked(all_finite(found, values))

    def codes(self, values: Any, scales: Any, draw: Draw) -> Any:
        """Code of each element, given N of each bucket."""
        on = kernels.beside(values)
        codes = on.arrays.empty(values, len(values), "uint8")
        work = np.empty(on.quantizer.WORDS, np.uint64)
        by = self.levels, self._negative
        on.quantizer.quantize(*_counters(draw), values, self.bucket, scales, *by, work, codes)
        return codes

    def pack(self, codes: Any, scales: Any, payload: Bytes) -> None:
        """Overwrite the payload."""
        n = len(codes)
        if self.coding == "fixed":
            (numbers,), planes = self._write(payload, n)
            numbers[:] = scales
            kernels.beside(payload).planes.pack_planes(codes, POWERS, planes)
            return
        check_size(self, payload, n, 1)
        if n:
            payload[: scales.nbytes].view(np.float32)[:] = scales
            length = self._length(n)
            used = rans.encode(codes, self._symbols, payload[length.stop :])
            written = used.to_bytes(len(length), "little")
            payload[length.start : length.stop] = np.frombuffer(written, np.uint8)
            payload[length.stop + used :] = 0


def _counters(draw: Draw) -> tuple[Any, ...]:
    """What says which random words are drawn: schedule, index of the first element, step and source."""
    return draw.stream.schedule(), np.uint64(draw.offset), np.uint64(draw.step & 0xFFFFFFFF), draw.source


def _recoded(codes: NDArray[np.uint8], levels: int, shift: int) -> NDArray[np.uint8]:
    """Codes with the numbers below zero shifted."""
    return codes + (codes > levels) * np.uint8(shift % 256)


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

    def _encode(self, values: Any, payload: Bytes, sent: Any, draw: Draw) -> Any:
        """See `Quantizer`; not in one pass."""
        return self._encode_drawn(values, payload, sent, draw)

    def _drawn(self, values: Any, draw: Draw) -> tuple[Any, Any, Any]:
        """See `Quantizer`; the scales are not those that levels were drawn by."""
        scales, finite = self._scaled(values)
        codes, arrays = self.codes(values, scales, draw), kernels.beside(values).arrays
        drawn = norms(arrays.convert(codes != 0, "float32"), self.bucket, "l1")  # how many
        found = norms(values, self.bucket, "l2") / arrays.xp.sqrt(arrays.xp.clip(drawn, 1, None))
        return codes, to_float32(found), finite
