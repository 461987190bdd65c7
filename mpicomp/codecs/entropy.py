"""Entropy coding of small integers, such as a quantizer's codes: rANS with one table of frequencies per message.

Of `levels` possible values, w = floor(log_levels 256) neighbours are coded as one super-symbol, the first counting
most. A message then costs the entropy of these, which is at most w times that of one symbol, and a step of the coder
covers w symbols. Statistics are the message's own.

Wire format. The last super-symbol is filled up with zeros.

    byte 0      0: plain, 1: coded
    plain       the super-symbols, one byte each
    coded       4 states, as little-endian uint32
                frequencies of all levels^w super-symbols out of 2^b, b = min(14, bits of their number), as Elias gamma
                codes of frequency + 1, lowest bits first, up to a byte's end
                words, as little-endian uint16

`mpicomp.kernels.rans` has the arithmetic. Super-symbol i is decoded from state i mod 4.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.base import Bytes
from mpicomp.kernels import rans

PLAIN, CODED = 0, 1
MOST_LEVELS = 255
_MODE_BYTES, _FREQUENCIES_AT = 1, 1 + 4 * rans.STATES
_FREQUENCY_BYTES = 1024  # more than 256 codes of 29 bits


def symbols_together(levels: int) -> int:
    """Symbols in a super-symbol.

    Raises
    ------
    ValueError
        `levels` is out of range.
    """
    if not 2 <= levels <= MOST_LEVELS:
        raise ValueError(f"entropy coding takes symbols of 2 to {MOST_LEVELS} levels, not {levels}")
    together = 1
    while levels ** (together + 1) <= 256:
        together += 1
    return together


def most_bytes(n: int, levels: int) -> int:
    """Longest payload of `n` symbols."""
    return _MODE_BYTES + -(-n // symbols_together(levels))


def encode(symbols: NDArray[np.uint8], levels: int, payload: Bytes) -> int:
    """Code symbols.

    Parameters
    ----------
    symbols : uint8[n]
        Below `levels`.
    levels : int
        2 to 255.
    payload : uint8[most_bytes(n, levels), or more]
        Overwritten.

    Returns
    -------
    int
        Bytes of the payload that are the message; the others are of no use.

    Raises
    ------
    ValueError
        A symbol is not below `levels`, or the payload is too short.
    """
    most = most_bytes(symbols.size, levels)
    if payload.size < most:
        raise ValueError(f"{symbols.size} symbols of {levels} levels may take {most} bytes, not {payload.size}")
    places, whole = _places(levels), symbols.size // symbols_together(levels)
    packed, counts = np.empty(most - _MODE_BYTES, np.uint8), np.zeros((4, 256), np.int64)
    largest = int(rans.group(symbols, places, packed[:whole], counts))
    if whole < packed.size:
        last = np.zeros(len(places), np.uint8)
        rest = symbols[whole * len(places) :]
        last[: rest.size] = rest
        largest = max(largest, int(rans.group(last, places, packed[whole:], counts)))
    if largest >= levels:
        raise ValueError(f"a symbol is {largest}, but there are {levels} levels: symbols are 0 to {levels - 1}")
    used = _code(packed, counts.sum(axis=0)[: levels ** len(places)], payload[:most])
    if used:
        return used
    payload[0] = PLAIN
    payload[_MODE_BYTES:most] = packed
    return most


def decode(payload: Bytes, levels: int, symbols: NDArray[np.uint8]) -> None:
    """Take symbols out of a payload again.

    Parameters
    ----------
    payload : uint8
        The bytes that `encode` used.
    levels : int
        As they were coded.
    symbols : uint8[n]
        Overwritten with symbols below `levels`, whatever the payload holds; n as it was coded.

    Raises
    ------
    ValueError
        The payload is seen to be damaged.
    """
    n, together = symbols.size, symbols_together(levels)
    packed = symbols if together == 1 else np.empty(-(-n // together), np.uint8)
    sound = False
    if payload.size == _MODE_BYTES + packed.size and payload[0] == PLAIN:
        packed[:] = payload[_MODE_BYTES:]
        sound = int(packed.max(initial=0)) < levels**together
    elif payload.size and payload[0] == CODED and n:
        sound = _uncode(payload, levels**together, packed)
    if not sound:
        symbols[:] = 0
        raise ValueError(f"a payload of {n} symbols of {levels} levels, of {payload.size} bytes, is damaged")
    if together > 1:
        rans.ungroup(packed, _digits(levels), together, symbols)


def _bits(n_packed: int) -> int:
    """Frequencies add up to 2^bits, which leaves room for every super-symbol that occurs."""
    return min(rans.MOST_BITS, n_packed.bit_length())


def _code(packed: Bytes, counts: NDArray[np.int64], payload: Bytes) -> int:
    """Write a coded message; returns its bytes, or 0 if it would not fit."""
    if not packed.size:
        return 0
    bits = _bits(packed.size)
    frequencies, written = np.empty_like(counts), np.empty(_FREQUENCY_BYTES, np.uint8)
    rans.normalise(counts, bits, frequencies)
    taken = int(rans.write_frequencies(frequencies, written))
    words_at = _FREQUENCIES_AT + taken
    table, states = np.empty((counts.size, rans.ENCODER_COLUMNS), np.uint32), np.empty(rans.STATES, np.uint64)
    rans.make_encoder(frequencies, bits, table)
    begin = int(rans.push(packed, table, words_at, payload, states))
    if begin < words_at:
        return 0
    used = words_at + payload.size - begin
    payload[0] = CODED
    payload[_MODE_BYTES:_FREQUENCIES_AT] = states.astype("<u4").view(np.uint8)
    payload[_FREQUENCIES_AT:words_at] = written[:taken]
    payload[words_at:used] = payload[begin:]
    return used


def _uncode(payload: Bytes, alphabet: int, packed: Bytes) -> bool:
    """Read a coded message; returns whether it was sound."""
    bits, frequencies = _bits(packed.size), np.empty(alphabet, np.int64)
    words_at = int(rans.read_frequencies(payload, _FREQUENCIES_AT, bits, frequencies))
    if words_at < 0:
        return False
    states = payload[_MODE_BYTES:_FREQUENCIES_AT].copy().view("<u4").astype(np.uint64)
    slots, ranges = np.empty(1 << bits, np.uint8), np.empty((256, 2), np.uint32)
    rans.make_decoder(frequencies, slots, ranges)
    end = int(rans.pull(payload, words_at, states, slots, ranges, bits, packed))
    return end == payload.size and bool((states == rans.LOWEST).all())


@lru_cache(maxsize=MOST_LEVELS)
def _places(levels: int) -> tuple[int, ...]:
    """What each symbol of a super-symbol is worth."""
    return tuple(levels**place for place in reversed(range(symbols_together(levels))))


@lru_cache(maxsize=MOST_LEVELS)
def _digits(levels: int) -> Bytes:
    """uint8[256 * 16]: the symbols of each super-symbol, and zeros."""
    digits = np.zeros((256, 16), np.uint8)
    every = np.arange(256)
    for column, place in enumerate(_places(levels)):
        digits[:, column] = every // place % levels
    return digits.reshape(-1)
