"""Nearest of a few levels times a scale for each bucket. Nothing is drawn.

Per bucket, with sigma^2 = mean v^2: q_i is the nearest level to v_i / sigma, the scale s = sum v q / sum q^2 is rounded
to bfloat16, and the values decode to s q. The levels are those that Lloyd and Max found for a Gaussian; 256 levels are
q_i = round(127 v_i / max |v|) with s = max |v| / 127.

Wire format: the codes of all buckets (`mpicomp.kernels.cpu.levels`), a zero byte where their number is odd, then the
scales as bfloat16.

References: S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 28, 1982; J. Max,
"Quantizing for minimum distortion", IRE Transactions on Information Theory 6, 1960.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collectives.annotations import Array, Bytes, FloatArray, override
from mpicomp import kernels
from mpicomp.codecs import entropy_levels
from mpicomp.codecs.base import AveragingCodec, Draw, FeedbackCodec, Finite, VariableCodec, check_size, require_finite
from mpicomp.codecs.level_buckets import MAGNITUDES, Buckets, Own, scratch, tables
from mpicomp.codecs.options import choice, integer, require, whole

MOST_BUCKET = 1 << 16
STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches
CACHE_LINE = 64


@lru_cache(maxsize=64)
def _uniform(codec: Levels, n: int) -> Buckets:
    starts = np.arange(0, n, codec.bucket)
    return codec.lay_out(starts, np.minimum(codec.bucket, n - starts))


@lru_cache(maxsize=64)
def _buckets_on(device: Any, codec: Levels, n: int) -> Buckets:
    return codec.buckets(n).on(partial(kernels.of("cuda").levels.places_on, device))


def _require_finite_sum(finite: Finite, *terms: Array) -> Finite:
    """Raise an error unless all scales of a sum are finite: ValueError for a sum that is not, else OverflowError."""
    if isinstance(finite, bool) and not finite:
        with np.errstate(all="ignore"):
            overflowed = bool(np.isfinite(sum(terms)).all())
        if overflowed:
            raise OverflowError("values are so large that sums of their magnitudes or squares overflow float32")
    return require_finite(finite)


@dataclass(frozen=True, slots=True)
class Levels(FeedbackCodec, AveragingCodec, VariableCodec):
    """Nearest of a few levels, times a scale for each bucket.

    Parameters
    ----------
    levels : 2, 3, 4, 8, 16 or 256
        Take 1, 1.6, 2, 3, 4 and 8 bits an element. 256 levels are equidistant.
    bucket : int
        Elements that share a scale of 16 bits: a multiple of 64, up to 65536.
    coding : "fixed" or "entropy"
        "entropy" takes 8 to 15 % fewer bits for the same error, and more time: equidistant levels with a wide zero in
        an entropy code. For 3, 4, 8 and 16 levels.

    Raises
    ------
    ValueError
        An option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, Levels
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Levels(4), np.array([3.0, -3.0, 0.9, -0.9], np.float32)
    >>> payload, decoded = np.empty(codec.nbytes(4), np.uint8), np.empty_like(values)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    True
    >>> codec.decode(payload, decoded, weight=1)
    >>> decoded.round(1)
    array([ 3. , -3. ,  0.9, -0.9], dtype=float32)
    """

    levels: int = 4
    bucket: int = 128
    coding: Literal["fixed", "entropy"] = "fixed"

    fuses = "residual"

    def __post_init__(self) -> None:
        integer(self, "levels")
        choice(self, "levels", tuple(MAGNITUDES))
        choice(self, "coding", ("fixed", "entropy"))
        codable = self.coding == "fixed" or self.levels in entropy_levels.CODINGS
        require(codable, "levels", "3, 4, 8 or 16 with coding='entropy'", self.levels)
        fits = whole(self.bucket, 64, MOST_BUCKET) and int(self.bucket) % 64 == 0
        require(fits, "bucket", f"a multiple of 64 up to {MOST_BUCKET}", self.bucket)
        object.__setattr__(self, "bucket", int(self.bucket))

    @property
    @override
    def alignment(self) -> int:
        return self.bucket

    @property
    @override
    def encodes_on_devices(self) -> bool:
        return self.coding == "fixed"

    @property
    def word(self) -> str:
        """Type of the codes' array."""
        return "uint64" if self.levels in (2, 4, 8, 16) else "uint8"

    def lay_out(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Buckets:
        """Return buckets with the places of their codes."""
        if self.coding == "entropy":
            nbytes = entropy_levels.most_bytes(entropy_levels.CODINGS[self.levels], lengths)
        elif self.word == "uint64":
            nbytes = 8 * (self.levels.bit_length() - 1) * -(-lengths // 64)
        else:
            nbytes = -(-lengths // 5) if self.levels == 3 else lengths
        return Buckets.of(starts, lengths, nbytes)

    def buckets(self, n: int) -> Buckets:
        """Return the buckets of a vector."""
        return _uniform(self, n)

    def _buckets_of(self, values: Array) -> Buckets:
        n = len(values)
        return self.buckets(n) if isinstance(values, np.ndarray) else _buckets_on(values.device, self, n)

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return self.buckets(n).nbytes

    def expected_bytes(self, n: int, weight: int = 1) -> int:
        """Return the bytes of a payload that are sent; with entropy coding those for a Gaussian."""
        if self.coding == "fixed":
            return self.nbytes(n)
        return entropy_levels.expected_bytes(entropy_levels.CODINGS[self.levels], n, -(-n // self.bucket))

    @property
    @override
    def varies(self) -> bool:
        return self.coding != "fixed"

    @override
    def count_used(self, payload: Bytes, n: int) -> int:
        if self.coding == "fixed":
            return payload.size
        return entropy_levels.count_used(payload, len(self.buckets(n).starts))

    def relay(
        self,
        buckets: Buckets,
        left: Array,
        payload: Bytes | None,
        own: Own = None,
        incoming: Bytes | None = None,
        base: int = 0,
        streaming: bool = False,
    ) -> Finite:
        """Add up a piece, encode the sum, and keep the error of its code; one pass over memory.

        Parameters
        ----------
        buckets : Buckets
            Of the piece.
        left : float32[n] or float64[n]
            Sums are of float32 in either case. On the device of all arrays. Overwritten with the error of the code, or
            with the sum.
        payload : uint8[buckets.nbytes] or None
            Overwritten with the code of the sum; None: the sum is not encoded.
        own : (vector[n], vector[n] or None), optional
            Like `left`: the sum begins with a vector and its residual, if it has one; None: it begins with `left`.
        incoming : uint8[buckets.nbytes], optional
            The code of values that are added.
        base : int
            Number of the piece's first element.
        streaming : bool
            `left` is written past the caches.

        Returns
        -------
        bool, or bool[] on a device
            Whether all scales are finite. The others are NaN.
        """
        if not isinstance(left, np.ndarray):
            u, residual = (left, None) if own is None else own
            added, made = buckets.views(incoming, self.word), buckets.views(payload, self.word, writes=True)
            layout = base, *buckets.there, self.bucket, tables(self.levels)
            return kernels.beside(left).levels.relay(self.levels, u, residual, *added, *layout, left, *made)
        if left.itemsize == 8:
            return self._relay_wide(buckets, left, payload, own, incoming, base)
        if self.coding == "entropy":
            return entropy_levels.relay(self.levels, buckets, left, payload, own, incoming, base)
        u, residual = (left, left) if own is None else own
        residual = u[:0] if residual is None else residual
        made, given = buckets.views(payload, self.word, writes=True), buckets.views(incoming, self.word)
        codes, scales = given if payload is None else made
        added, added_scales = made if incoming is None else given
        cpu, streaming = kernels.of("cpu").levels, streaming and left.ctypes.data % CACHE_LINE == 0
        finite: bool = cpu.relay(
            *cpu.PACKING[self.levels], u, residual, own is not None, added, added_scales, incoming is not None, base,
            buckets.starts, buckets.lengths, tables(self.levels), streaming, payload is not None,
            scratch(self.bucket).work, left, codes, scales,
        )  # fmt: skip
        return finite

    def _relay_wide(
        self, buckets: Buckets, left: FloatArray, payload: Bytes | None, own: Own, incoming: Bytes | None, base: int
    ) -> Finite:
        """Do as `relay` for float64, whose vectors are too rare for kernels of their own, which compile for long."""
        vector, residual = (left, None) if own is None else own
        with np.errstate(all="ignore"):
            total = (vector if residual is None else vector + residual).astype(np.float32)
        finite = self.relay(buckets, total, payload, None, incoming, base)
        for start, length in zip(buckets.starts.tolist(), buckets.lengths.tolist(), strict=True):
            part = slice(start - base, start - base + length)  # zeros between tensors stay
            left[part] = total[part]
        return finite

    def spread(self, buckets: Buckets, payload: Bytes, ranks: int, base: int, out: Array) -> Finite:
        """Overwrite `out` with decoded values over a number of ranks, and zeros between buckets.

        Returns
        -------
        bool, or bool[] on a device
            Whether all scales are finite.
        """
        if self.coding == "entropy":
            return entropy_levels.decode(entropy_levels.CODINGS[self.levels], buckets, payload, base, out, ranks)
        codes, scales = buckets.views(payload, self.word)
        if not isinstance(out, np.ndarray):
            layout = *buckets.there, self.bucket, tables(self.levels)
            return kernels.beside(out).levels.spread(self.levels, codes, scales, ranks, base, *layout, out)
        cpu = kernels.of("cpu").levels
        streaming = len(out) >= STREAMING_ELEMENTS and out.ctypes.data % CACHE_LINE == 0
        finite: bool = cpu.spread(
            *cpu.PACKING[self.levels], codes, scales, np.float32(ranks), base, buckets.starts, buckets.lengths,
            tables(self.levels), streaming, scratch(self.bucket).work, out,
        )  # fmt: skip
        return finite

    @override
    def encode(self, values: Array, payload: Bytes, *, draw: Draw) -> Finite:
        check_size(self, payload, len(values), 1)
        left = kernels.beside(values).arrays.xp.empty_like(values)
        return _require_finite_sum(self.relay(self._buckets_of(values), left, payload, (values, None)), values)

    @override
    def encode_keeping(self, values: Array, residual: Array, payload: Bytes, left: Array, decay: float = 1.0) -> Finite:
        check_size(self, payload, len(left), 1)
        buckets, on = self._buckets_of(left), kernels.beside(left).arrays
        if left.itemsize == 4:
            return _require_finite_sum(self.relay(buckets, left, payload, (values, residual)), values, residual)
        # the kernels' sums are float32, and would lose bits that the next steps can send
        with np.errstate(all="ignore"):
            on.compensate(values, residual, None, left)
            sent = on.convert(left, "float32")
            finite = self.relay(buckets, sent, payload)
            self.spread(buckets, payload, 1, 0, sent)
            left -= sent
        return _require_finite_sum(finite, values, residual)

    @override
    def decode(self, payload: Bytes, values: Array, *, weight: int) -> None:
        check_size(self, payload, len(values), weight)
        if not isinstance(values, np.ndarray):
            self._average(payload, 1, 0, values)
        elif not self.spread(self.buckets(len(values)), payload, 1, 0, values):
            values[~np.isfinite(values)] = 0  # of damage

    @override
    def add(self, payload: Bytes, sums: Array) -> None:
        check_size(self, payload, len(sums), 1)
        if sums.itemsize == 4:
            self.relay(self._buckets_of(sums), sums, None, incoming=payload)
            return
        sent = kernels.beside(sums).arrays.empty(sums, len(sums), "float32")
        self.decode(payload, sent, weight=1)
        sums += sent

    @override
    def mean(self, payloads: Array, mean: Array) -> Finite:
        check_size(self, payloads[0], len(mean), 1)
        return self._average(payloads[0], len(payloads), payloads.stride(0), mean)

    def _average(self, first: Bytes, ranks: int, row_bytes: int, mean: Array) -> Finite:
        """Do as `mean` for payloads in rows of so many bytes, given the first."""
        buckets, average = self._buckets_of(mean), kernels.beside(mean).levels.spread
        codes, scales = buckets.views(first, self.word)
        layout = *buckets.there, self.bucket, tables(self.levels)
        return average(self.levels, codes, scales, ranks, 0, *layout, mean, row_bytes)
