"""Counts in Elias codes: the likely ones, near half of the ranks, in fewer bits.

A count of m ranks is numbered from its mode floor(m/2) outwards, mode 1, mode + 1 2, mode - 1 3, mode + 2 4, ..., and
the numbers are written in Elias' gamma or delta code (layout:
`mpicomp.kernels.cpu.elias_counts`). With fair coins that takes 3.05 bits for 8 ranks, where the fixed width is 4, but
2.5 for 3 ranks, where it is 2: so each message is coded in the way that is shortest for it, and says which that is.

Wire format: a header of two little-endian 32-bit words, the coding (0 fixed width, 1 gamma, 2 delta) and the length in
bytes of what follows; then bit planes as in `mpicomp.codecs.vote_counts`, or codes, zeros filling up the last 64 bits.

Reference: P. Elias, "Universal codeword sets and representations of the integers", IEEE Trans. Inf. Theory 21 (1975).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes, Draw, check_size
from mpicomp.codecs.vote_counts import Counts, planes_of
from mpicomp.kernels.cpu.elias_counts import MOST_DIGITS, coded_bits, read_codes, write_codes
from mpicomp.kernels.cpu.planes import pack_planes, powers_of_two, unpack_planes
from mpicomp.kernels.streams import BLOCK

HEADER = 8
_POWERS = powers_of_two(16, np.uint16)
FIXED, GAMMA, DELTA = 0, 1, 2
MOST_WEIGHT = (2 << MOST_DIGITS) - 2  # ranks: their counts' numbers, and so all codes, are short enough


class Tables(NamedTuple):
    """What the kernels need to know of counts of one weight.

    Attributes
    ----------
    codes, lengths : dict of uint64 arrays
        By coding; an entry for every value that so many bits can have. One that no count has takes the last one's.
    values : uint16
        The count that each number stands for; number 0 is none.
    """

    codes: dict[int, NDArray[np.uint64]]
    lengths: dict[int, NDArray[np.uint64]]
    values: NDArray[np.uint16]


def _gamma(number: int) -> tuple[int, int]:
    """Code, the first bit lowest, and its length."""
    digits = number.bit_length() - 1
    below = number - (1 << digits)
    return (1 << digits) | below << (digits + 1), 2 * digits + 1


def _delta(number: int) -> tuple[int, int]:
    digits = number.bit_length() - 1
    code, length = _gamma(digits + 1)
    return code | (number - (1 << digits)) << length, length + digits


@lru_cache(maxsize=64)
def tables(weight: int) -> Tables:
    """For counts of `weight` ranks, `MOST_WEIGHT` at most."""
    mode, planes = weight // 2, planes_of(weight)
    outwards = sorted(range(weight + 1), key=lambda count: (abs(count - mode), count < mode))
    number_of = {count: number for number, count in enumerate(outwards, 1)}
    numbers = [number_of[min(count, weight)] for count in range(1 << planes)]
    codes, lengths = {}, {}
    for coding, code in ((GAMMA, _gamma), (DELTA, _delta)):
        codes[coding], lengths[coding] = np.array([code(number) for number in numbers], np.uint64).T.copy()
    return Tables(codes, lengths, np.array([0, *outwards], np.uint16))


@dataclass(frozen=True, slots=True)
class Elias:
    """Counts of positive values in messages that are as long as they need be; decodes to the mean of the signs."""

    alignment: ClassVar[int] = BLOCK

    def nbytes(self, n: int, weight: int = 1) -> int:
        """The most a message can have: its header and the counts in fixed width."""
        return HEADER + Counts().nbytes(n, weight)

    def encode(self, values: NDArray[Any], payload: Bytes, *, draw: Draw) -> None:
        """Write one rank's counts, which no code makes shorter. Zeros alternate with the parity of step + index.

        Raises ValueError if a value is not finite.
        """
        check_size(self, payload, values.size, 1)
        Counts().encode(values, payload[HEADER:], draw=draw)
        _describe(payload, FIXED, payload.size - HEADER)

    def decode(self, payload: Bytes, values: NDArray[Any], *, weight: int) -> None:
        """Write (2 count - weight) / weight.

        Raises
        ------
        ValueError
            The payload is damaged.
        """
        if payload.size != message_bytes(payload):
            raise ValueError(f"Elias: {payload.size} bytes begin with a shorter message: they are damaged")
        planes = np.empty(Counts().nbytes(values.size, weight) // 8, np.uint64)
        self.read(payload, values.size, weight, planes, scratch(values.size))
        Counts().decode(planes.view(np.uint8), values, weight=weight)

    def write(self, planes: NDArray[np.uint64], n: int, weight: int, message: Bytes, work: NDArray[np.uint16]) -> int:
        """Code counts in whichever way is shortest.

        planes : uint64, counts as `Counts` has them; what is behind them does no harm. message : uint8, of at least
        ``nbytes(n, weight)``; begins with the message afterwards. work : ``scratch(n)``.

        Returns
        -------
        int
            Bytes of the message.
        """
        size, coding = Counts().nbytes(n, weight), FIXED
        if 1 < weight <= MOST_WEIGHT:
            known, counts = tables(weight), work[:n]
            unpack_planes(_rows(planes, n, weight), _POWERS, counts)
            gamma, delta = coded_bits(counts, known.lengths[GAMMA], known.lengths[DELTA])
            shortest = 8 * -(-int(min(gamma, delta)) // 64)
            if shortest < size:
                size, coding = shortest, GAMMA if gamma <= delta else DELTA
                out = message[HEADER : HEADER + size].view(np.uint32)
                write_codes(counts, known.codes[coding], known.lengths[coding], out)
        if coding == FIXED:
            message[HEADER : HEADER + size] = planes[: size // 8].view(np.uint8)
        _describe(message, coding, size)
        return HEADER + size

    def read(self, message: Bytes, n: int, weight: int, planes: NDArray[np.uint64], work: NDArray[np.uint16]) -> None:
        """The opposite of `write`; `message` may have other bytes behind it.

        planes : uint64, of at least ``Counts().nbytes(n, weight)`` bytes, overwritten. work : ``scratch(n)``.

        Raises
        ------
        ValueError
            The message is damaged.
        """
        size, end = Counts().nbytes(n, weight), message_bytes(message)
        coding, length, body = int(message[:HEADER].view(np.uint32)[0]), end - HEADER, message[HEADER:end]
        if coding == FIXED and length == size:
            planes[: size // 8] = body.view(np.uint64)
        elif coding in (GAMMA, DELTA) and length % 8 == 0 and 1 < weight <= MOST_WEIGHT:
            if not read_codes(body.view(np.uint32), coding == DELTA, tables(weight).values, work[:n]):
                raise ValueError(f"Elias: these codes of {n} counts of {weight} ranks are damaged")
            pack_planes(work[:n], _POWERS, _rows(planes, n, weight))
        else:
            raise ValueError(
                f"Elias: {n} counts of {weight} ranks do not take {length} bytes in coding {coding}: they are damaged"
            )


def scratch(n: int) -> NDArray[np.uint16]:
    """Working memory for messages of up to `n` counts."""
    return np.empty(n, np.uint16)


def _rows(planes: NDArray[np.uint64], n: int, weight: int) -> NDArray[np.uint64]:
    words = -(-n // 64)
    return planes[: planes_of(weight) * words].reshape(planes_of(weight), words)


def message_bytes(message: Bytes) -> int:
    """How long the message is that these bytes begin with.

    Raises
    ------
    ValueError
        Longer than they are.
    """
    nbytes = HEADER + (int(message[:HEADER].view(np.uint32)[1]) if message.size >= HEADER else 0)
    if message.size < nbytes:
        raise ValueError(f"Elias: {message.size} bytes do not hold a message of {nbytes}: it is damaged")
    return nbytes


def _describe(message: Bytes, coding: int, length: int) -> None:
    message[:HEADER].view(np.uint32)[:] = coding, length
