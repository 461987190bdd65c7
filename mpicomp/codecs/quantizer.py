"""Stochastic quantization: 2 s + 1 levels a bucket, unbiased.

    Q(x)_i = N sgn(x_i) xi_i,   xi_i = l / s with probability l + 1 - s |x_i| / N, else (l + 1) / s
                                l = floor(s |x_i| / N)

N is the bucket's norm, l2 or l_inf. With l2, E ||Q(v) - v||^2 <= min(d / s^2, sqrt(d) / s) ||v||^2 for buckets of d.

Wire format: each bucket's N as float32 (`mpicomp.codecs.bucketed`), then codes of ceil(log2(2 s + 1)) bits as bit
planes: plane j, ceil(n / 64) words, has bit j of each code. A code is the level, with the sign (1: negative) as the
highest bit.

With entropy coding the codes are symbols, 0 to s and, below zero, s + level. Behind the norms stands the length of the
message, little-endian, in as few bytes as the longest message of n symbols needs, then the message of
`mpicomp.codecs.rans`.

References: QSGD (Alistarh et al., NIPS 2017); ECQ-SGD (Wu et al., ICML 2018); TernGrad (Wen et al., NIPS 2017).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from collectives.annotations import Array, Bytes, Words, override
from mpicomp import kernels
from mpicomp.codecs import rans
from mpicomp.codecs.base import Draw, FeedbackCodec, Finite, SpreadingCodec, VariableCodec, check_size, require_finite
from mpicomp.codecs.bucketed import Bucketed, all_finite, confirm_finite, count, kind_of, norms, to_float32
from mpicomp.codecs.options import choice, flag, integer
from mpicomp.kernels.cpu.quantizer import POWERS

MOST_LEVELS = 127


@dataclass(frozen=True, slots=True)
class Quantizer(Bucketed, FeedbackCodec, SpreadingCodec, VariableCodec):
    """Randomized quantization of float32 or float64 values.

    Parameters
    ----------
    bucket : int
        Elements that share a norm.
    levels : int
        s, 1 to 127.
    norm : "l2" or "linf"
        Norm that scales the levels of a bucket.
    coding : "fixed" or "entropy"
        Codes of ceil(log2(2 s + 1)) bits, or an entropy code for each message: about as many bits as the entropy of
        the message's codes, on the host alone.
    correlated : bool
        True: ranks share their random words, shifted so that their roundings cancel where their values agree. Each
        rank's values stay unbiased.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, Quantizer
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Quantizer(levels=2), np.array([4.0, -2.0, 1.0, 0.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> decoded = np.empty_like(values)
    >>> codec.decode(payload, decoded, weight=1)
    >>> decoded
    array([ 4., -2.,  2.,  0.], dtype=float32)

    See Also
    --------
    Ternary : one level, scaled to keep the bucket's length
    """

    levels: int = 4
    norm: Literal["l2", "linf"] = "linf"
    coding: Literal["fixed", "entropy"] = "fixed"
    correlated: bool = False

    fuses = "sent"

    def __post_init__(self) -> None:
        Bucketed.__post_init__(self)
        flag(self, "correlated")
        integer(self, "levels", 1, MOST_LEVELS)
        choice(self, "norm", ("l2", "linf"))
        choice(self, "coding", ("fixed", "entropy"))

    @property
    @override
    def bits(self) -> int:
        return self.levels.bit_length() + 1

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        if self.coding == "fixed":
            return Bucketed.nbytes(self, n, weight)
        return -(-(self._length(n).stop + rans.most_bytes(n, self._symbols)) // 8) * 8 if n else 0

    @property
    @override
    def varies(self) -> bool:
        return self.coding != "fixed"

    @override
    def count_used(self, payload: Bytes, n: int) -> int:
        if self.coding == "fixed" or not n:
            return payload.size
        length = self._length(n)
        return min(length.stop + int.from_bytes(payload[length.start : length.stop].tobytes(), "little"), payload.size)

    def _length(self, n: int) -> range:
        """Return the positions of the bytes that hold the length of the message of `n` symbols."""
        start = 4 * count(n, self.bucket)
        return range(start, start + -(-rans.most_bytes(n, self._symbols).bit_length() // 8))

    @property
    def _symbols(self) -> int:
        return 2 * self.levels + 1

    @property
    def _negative(self) -> int:
        """Difference between the codes of a negative and a positive level."""
        return 1 << (self.bits - 1) if self.coding == "fixed" else self.levels

    @property
    def fixed(self) -> Quantizer:
        """The same quantizer with fixed codes, for devices, which have no entropy coding."""
        return replace(self, coding="fixed")

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        return self._encode(values, payload, None, draw)

    @override
    def encode_telling(self, values: Array, payload: Bytes, sent: Array, *, draw: Draw) -> Finite:
        return self._encode(values, payload, sent, draw)

    def encode_scaled(self, values: Array, scales: Array, payload: Bytes, *, draw: Draw) -> None:
        """Encode to fixed codes with N of each bucket given; values that are not finite raise no error."""
        self._write_codes(values, payload, None, draw, scales)

    def _encode(self, values: Array, payload: Bytes, sent: Array | None, draw: Draw) -> Finite:
        if self.coding == "fixed":
            return require_finite(confirm_finite(self._write_codes(values, payload, sent, draw), values))
        return self._encode_drawn(values, payload, sent, draw)

    def _write_codes(
        self, values: Array, payload: Bytes, sent: Array | None, draw: Draw, scales: Array | None = None
    ) -> Finite:
        """Overwrite a payload of fixed codes in one pass; return whether the buckets' norms are finite."""
        kernel = kernels.beside(values).quantizer
        (numbers,), planes = self._write(payload, len(values))
        norm: int | None = kind_of(self.norm)
        if scales is not None:
            numbers[:], norm = scales, None
        work, by = np.empty(kernel.WORDS, np.uint64), (self.levels, self._negative)
        return kernel.encode(
            *_counters(draw, self.correlated), values, self.bucket, norm, numbers, *by, work, sent, planes
        )

    def _encode_drawn(self, values: Array, payload: Bytes, sent: Array | None, draw: Draw) -> Finite:
        codes, scales, finite = self._draw_codes(values, draw)
        self.pack(codes, scales, payload)
        if sent is not None:
            self._values(codes, scales, sent)
        return finite

    @override
    def _spread(self, payload: Bytes, out: Array, weight: int, adding: bool) -> None:
        if self.coding == "entropy":
            self._values(*self._unpack(payload, len(out), weight), out, adding)
            return
        (scales,), planes = self._read(payload, len(out), weight)
        kernel = kernels.beside(out).quantizer
        work = np.empty(kernel.WORDS, np.uint64)
        kernel.decode(planes, self.bucket, scales, self.levels, self._negative, work, out, adding)

    @override
    def mean(self, payloads: Array, mean: Array) -> Finite:
        numbers, planes = self._read_all(payloads, len(mean))
        average = kernels.beside(mean).quantizer.mean
        return average(planes, self.bucket, numbers[:, 0], self.levels, self._negative, mean)

    def to_fixed(self, payload: Bytes, n: int, fixed: Bytes) -> None:
        """Recode a payload of `n` elements on the host: overwrite `fixed`, a payload of fixed codes."""
        codes, scales = self._unpack(payload, n, 1)
        other = self.fixed
        other.pack(_shift_codes(codes, self.levels, other._negative - self._negative), scales, fixed)

    def from_fixed(self, fixed: Bytes, n: int, payload: Bytes) -> None:
        """Recode a payload of fixed codes: the inverse of `to_fixed`."""
        other = self.fixed
        codes, scales = other._unpack(fixed, n, 1)
        self.pack(_shift_codes(codes, self.levels, self._negative - other._negative), scales, payload)

    def _unpack(self, payload: Bytes, n: int, weight: int) -> tuple[Array, Array]:
        """Return the codes, and N of each bucket, unchecked."""
        on = kernels.beside(payload)
        codes = on.arrays.empty(payload, n, "uint8")
        if self.coding == "fixed":
            (scales,), planes = self._read(payload, n, weight)
            on.planes.unpack_planes(planes, POWERS, codes)
            return codes, scales
        check_size(self, payload, n, weight)
        if n:
            rans.decode(payload[self._length(n).stop : self.count_used(payload, n)], self._symbols, codes)
        return codes, payload[: 4 * count(n, self.bucket)].view(np.float32)

    def _values(self, codes: Array, scales: Array, out: Array, adding: bool = False) -> None:
        dequantize = kernels.beside(out).quantizer.dequantize  # only damage makes scales infinite: they count as 0
        dequantize(codes, self.bucket, scales, self.levels, self._negative, out, adding)

    def _draw_codes(self, values: Array, draw: Draw) -> tuple[Array, Array, Finite]:
        """Return codes, N of each bucket, and whether all values are finite."""
        scales, finite = self._scale(values)
        return self.codes(values, scales, draw), scales, finite

    def scales(self, values: Array) -> Array:
        """Return N of each bucket. Raises ValueError if a value is not finite."""
        return self._scale(values)[0]

    def _scale(self, values: Array) -> tuple[Array, Finite]:
        found = norms(values, self.bucket, self.norm)
        return to_float32(found), require_finite(all_finite(found, values))

    def codes(self, values: Array, scales: Array, draw: Draw) -> Array:
        """Draw the code of each element, given N of each bucket."""
        on = kernels.beside(values)
        codes = on.arrays.empty(values, len(values), "uint8")
        work = np.empty(on.quantizer.WORDS, np.uint64)
        by = self.levels, self._negative
        on.quantizer.quantize(*_counters(draw, self.correlated), values, self.bucket, scales, *by, work, codes)
        return codes

    def pack(self, codes: Array, scales: Array, payload: Bytes) -> None:
        """Overwrite the payload with the codes of elements and N of each bucket."""
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


def _counters(draw: Draw, correlated: bool) -> tuple[Words, np.uint64, np.uint64, np.uint64]:
    """Return the key schedule, and the counters of the first element, step and source."""
    source = draw.shared_source if correlated else draw.source
    return draw.stream.schedule(), np.uint64(draw.offset), np.uint64(draw.step & 0xFFFFFFFF), source


def _shift_codes(codes: Bytes, levels: int, shift: int) -> Bytes:
    """Shift the codes of negative levels."""
    return codes + (codes > levels) * np.uint8(shift % 256)
