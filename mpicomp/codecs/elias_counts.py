"""Counts in Elias codes: likely counts, near half of the ranks, take fewer bits.

A count of m ranks is numbered from its mode floor(m/2) outwards, mode 1, mode + 1 2, mode - 1 3, mode + 2 4, ..., and
the numbers are written in Elias' gamma or delta code (layout: `mpicomp.kernels.cpu.elias_counts`). With fair coins that
takes 3.05 bits for 8 ranks, where the fixed width is 4, but 2.5 for 3 ranks, where it is 2. So each message takes the
shortest of the three codings, and its header names that.

Wire format: a header of two little-endian 32-bit words, the coding (0 fixed width, 1 gamma, 2 delta) and the length in
bytes of the body; then bit planes as in `mpicomp.codecs.vote_counts`, or codes, zeros filling up the last 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.annotations import Bytes, FloatArray, Words, override
from mpicomp.codecs.base import Codec, Draw, check_size
from mpicomp.codecs.vote_counts import Counts, planes_of
from mpicomp.kernels.cpu.elias_counts import MOST_DIGITS, coded_bits, read_codes, write_codes
from mpicomp.kernels.cpu.planes import pack_planes, powers_of_two, unpack_planes
from mpicomp.kernels.streams import BLOCK

Scratch: TypeAlias = NDArray[np.uint16]

HEADER = 8
_POWERS = powers_of_two(16, np.uint16)
FIXED, GAMMA, DELTA = 0, 1, 2
MOST_WEIGHT = (2 << MOST_DIGITS) - 2  # ranks; the codes of their counts are short enough for the kernels


class Tables(NamedTuple):
    """Tables of the kernels for counts of one weight."""

    # by coding; an entry for every value that fits the bits of a count, the weight's for values above it
    codes: dict[int, Words]
    lengths: dict[int, Words]
    values: NDArray[np.uint16]  # count of each number; the entry of number 0 is unused


def _gamma(number: int) -> tuple[int, int]:
    """Return the code, the first bit lowest, and its length."""
    digits = number.bit_length() - 1
    below = number - (1 << digits)
    return (1 << digits) | below << (digits + 1), 2 * digits + 1


def _delta(number: int) -> tuple[int, int]:
    digits = number.bit_length() - 1
    code, length = _gamma(digits + 1)
    return code | (number - (1 << digits)) << length, length + digits


@lru_cache(maxsize=64)
def tables(weight: int) -> Tables:
    """Return the tables for counts of `weight` ranks, at most `MOST_WEIGHT`."""
    mode, planes = weight // 2, planes_of(weight)
    outwards = sorted(range(weight + 1), key=lambda count: (abs(count - mode), count < mode))
    number_of = {count: number for number, count in enumerate(outwards, 1)}
    numbers = [number_of[min(count, weight)] for count in range(1 << planes)]
    codes, lengths = {}, {}
    for coding, code in ((GAMMA, _gamma), (DELTA, _delta)):
        codes[coding], lengths[coding] = np.array([code(number) for number in numbers], np.uint64).T.copy()
    return Tables(codes, lengths, np.array([0, *outwards], np.uint16))


@dataclass(frozen=True, slots=True)
class Elias(Codec):
    """Sends counts of positive values in messages of variable length; decodes to the mean of the signs.

    A payload has room for the longest message, header and counts of fixed width. `write` returns the message's length.

    References
    ----------
    P. Elias, "Universal codeword sets and representations of the integers", IEEE Trans. Inf. Theory 21 (1975).

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.codecs import Draw, Elias
    >>> from mpicomp.kernels.streams import Stream
    >>> codec, values = Elias(), np.array([3.0, -1.0, 2.0], np.float32)
    >>> payload = np.empty(codec.nbytes(values.size), np.uint8)
    >>> codec.encode(values, payload, draw=Draw(Stream(0, 0, "example"), step=0, rank=0))
    >>> codec.decode(payload, values, weight=1)
    >>> values
    array([ 1., -1.,  1.], dtype=float32)
    """

    alignment: ClassVar[int] = BLOCK

    @override
    def nbytes(self, n: int, weight: int = 1) -> int:
        return HEADER + Counts().nbytes(n, weight)

    @override
    def encode(self, values: FloatArray, payload: Bytes, *, draw: Draw) -> None:
        # a single rank's counts are bits, which no code makes shorter
        check_size(self, payload, values.size, 1)
        Counts().encode(values, payload[HEADER:], draw=draw)
        _describe(payload, FIXED, payload.size - HEADER)

    @override
    def decode(self, payload: Bytes, values: FloatArray, *, weight: int) -> None:
        if payload.size != message_bytes(payload):
            raise ValueError(f"Elias: {payload.size} bytes begin with a shorter message: they are damaged")
        planes = np.empty(Counts().nbytes(values.size, weight) // 8, np.uint64)
        self.read(payload, values.size, weight, planes, scratch(values.size))
        Counts().decode(planes.view(np.uint8), values, weight=weight)

    def write(self, planes: Words, n: int, weight: int, message: Bytes, work: Scratch) -> int:
        """Write counts in the shortest coding.

        Parameters
        ----------
        planes : uint64
            Counts as in a payload of `Counts`; further words are ignored.
        message : uint8, at least ``nbytes(n, weight)``
            Overwritten: the message, at the beginning.
        work : ``scratch(n)``

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

    def read(self, message: Bytes, n: int, weight: int, planes: Words, work: Scratch) -> None:
        """Read the counts that `write` wrote.

        Parameters
        ----------
        message : uint8
            Bytes behind the message are ignored.
        planes : uint64, at least ``Counts().nbytes(n, weight)`` bytes
            Overwritten.
        work : ``scratch(n)``

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


def scratch(n: int) -> Scratch:
    """Return working memory for messages of up to `n` counts."""
    return np.empty(n, np.uint16)


def _rows(planes: Words, n: int, weight: int) -> Words:
    words = -(-n // 64)
    return planes[: planes_of(weight) * words].reshape(planes_of(weight), words)


def message_bytes(message: Bytes) -> int:
    """Return the length of the message at the beginning of these bytes; ValueError if it is longer than they are."""
    nbytes = HEADER + (int(message[:HEADER].view(np.uint32)[1]) if message.size >= HEADER else 0)
    if message.size < nbytes:
        raise ValueError(f"Elias: {message.size} bytes do not hold a message of {nbytes}: it is damaged")
    return nbytes


def _describe(message: Bytes, coding: int, length: int) -> None:
    message[:HEADER].view(np.uint32)[:] = coding, length
