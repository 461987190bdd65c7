"""Payloads of `Levels` with entropy coding: uniform levels with a wide zero, and one table of frequencies a message.

The steps are those whose error is that of the fixed levels for a Gaussian, which takes 1.46, 1.81, 2.70 and 3.64 bits
an element; updates of trainings, whose tails are heavier, take 0.05 to 0.15 fewer.

Wire format: the scales as bfloat16, the length of the message as little-endian uint32, then the message of
`mpicomp.codecs.rans`, of symbols q + most (`mpicomp.kernels.cpu.entropy_levels`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from collectives.annotations import Array, Bytes, FloatArray
from mpicomp import kernels
from mpicomp.codecs import rans
from mpicomp.codecs.level_buckets import Buckets, Own


class EntropyCode(NamedTuple):
    """Step over the deviation, the largest q, and the bits that an element of a Gaussian takes."""

    step: float
    most: int
    bits: float

    @property
    def symbols(self) -> int:
        """Number of symbols."""
        return 2 * self.most + 1


CODINGS = {
    3: EntropyCode(1.45, 7, 1.46),
    4: EntropyCode(1.13, 7, 1.81),
    8: EntropyCode(0.61, 15, 2.70),
    16: EntropyCode(0.32, 31, 3.64),
}
"""By number of the levels whose error they have."""
_LENGTH_BYTES = 4
_OVERHEAD = 6
"""Bytes that a bucket may take besides its symbols and scale: one has those of the message's length and mode."""


def most_bytes(coding: EntropyCode, lengths: Array) -> Array:
    """Return the most bytes that the symbols of each bucket take, with room for the message's other bytes."""
    return -(-lengths // rans.symbols_together(coding.symbols)) + _OVERHEAD


def expected_bytes(coding: EntropyCode, n: int, n_buckets: int) -> int:
    """Return the bytes of a payload of `n` elements of a Gaussian."""
    return 2 * n_buckets + _OVERHEAD + int(coding.bits * n / 8)


def count_used(payload: Bytes, n_buckets: int) -> int:
    """Return the bytes of a payload that must be sent."""
    start = 2 * n_buckets
    message = int.from_bytes(payload[start : start + _LENGTH_BYTES].tobytes(), "little")
    return min(start + _LENGTH_BYTES + message, payload.size) if n_buckets else 0


def relay(
    levels: int, buckets: Buckets, left: FloatArray, payload: Bytes | None, own: Own, incoming: Bytes | None, base: int
) -> bool:
    """Do as `Levels.relay`, in separate passes."""
    if own is not None:
        vector, residual = own
        with np.errstate(all="ignore"):
            np.add(vector, 0 if residual is None else residual, out=left)
    if incoming is not None:
        decode(CODINGS[levels], buckets, incoming, base, left, adds=True)
    return payload is None or encode(CODINGS[levels], buckets, left, payload, base)


def encode(coding: EntropyCode, buckets: Buckets, values: FloatArray, payload: Bytes, base: int) -> bool:
    """Overwrite a payload, and `values`, float32, with the errors; return whether all scales are finite."""
    if not len(buckets.lengths):
        return True
    at = 2 * len(buckets.lengths)
    symbols = np.empty(int(buckets.lengths.sum()), np.uint8)
    scales = payload[:at].view(np.uint16)
    quantize = kernels.of("cpu").entropy_levels.quantize
    finite: bool = quantize(values, base, buckets.starts, buckets.lengths, coding.step, coding.most, symbols, scales)
    begin = at + _LENGTH_BYTES
    length = rans.encode(symbols, coding.symbols, payload[begin:])
    payload[begin + length :] = 0
    payload[at:begin] = np.array([length], "<u4").view(np.uint8)
    return finite


def decode(
    coding: EntropyCode,
    buckets: Buckets,
    payload: Bytes,
    base: int,
    out: FloatArray,
    ranks: int = 1,
    adds: bool = False,
) -> bool:
    """Overwrite `out` with decoded values over a number of ranks, or add them; return whether all scales are finite."""
    at, begin = 2 * len(buckets.lengths), 2 * len(buckets.lengths) + _LENGTH_BYTES
    symbols, scales = np.empty(int(buckets.lengths.sum()), np.uint8), payload[:at].view(np.uint16)
    if len(scales):
        try:
            rans.decode(payload[begin : count_used(payload, len(scales))], coding.symbols, symbols)
        except ValueError:
            # ranks agree by the values that a step has failed
            scales = np.full_like(scales, kernels.of("cpu").levels.NAN)
    place = kernels.of("cpu").entropy_levels.place
    finite: bool = place(
        symbols, scales, base, buckets.starts, buckets.lengths, coding.most, np.float32(ranks), adds, out
    )
    return finite
