"""Entropy coding of small integers, such as a quantizer's codes: rANS with one table of frequencies per message.

Of `levels` possible values, w = floor(log_levels 256) neighbours are coded as one super-symbol, the first as the most
significant digit. A message then costs the entropy of the super-symbols, at most w times that of one symbol, and a step
of the coder covers w symbols. Each message has its own statistics.

Messages of up to 8192 symbols are coded with w = 1 and one state: four states and the frequencies of all neighbours
would take more bytes than the symbols do.

Wire format. The last super-symbol is filled up with zeros.

    byte 0      0: plain, 1: coded, 2: coded by symbols
    plain       the super-symbols, one byte each; w as in long messages
    coded       the states, 1 or 4, as little-endian uint32
                frequencies of the levels^w super-symbols out of 2^b, b = min(14, bits of their number), as Elias gamma
                codes of frequency + 1, lowest bits first, up to a byte's end. The code of a frequency 0 is followed by
                that of how many of these there are in a row. The codes end where the frequencies add up to 2^b
                words, as little-endian uint16
    by symbols  the same with other frequencies, in the same codes: those of the `levels` symbols, then 1 for each
                super-symbol that occurs but is not expected; together 2^b. `_by_symbols` computes the frequencies of
                super-symbols from these

Where symbols do not depend on their neighbours, the frequencies of super-symbols follow from those of symbols, which
take fewer bytes. A message is coded by symbols if the frequencies would take more than 1 % of it otherwise, and if that
makes it shorter. Without that, messages of 200,000 to 240,000 symbols of an entropy of 0.1 bits (a quantizer with
``levels=1, bucket=5000``) are 2.1 to 2.5 % longer than their entropy; with it, 1.0 to 1.2 %.

`mpicomp.kernels.cpu.rans` has the arithmetic. Super-symbol i is decoded from state i mod 4, or from the only one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from collectives.annotations import Bytes, Indices
from mpicomp.kernels.cpu import rans

PLAIN, CODED, BY_SYMBOLS = 0, 1, 2
MOST_LEVELS = 255
SHORT = 8192
"""Symbols of the longest message that is coded with one state. Longer messages take four states."""
_MODE_BYTES, _STATES = 1, 4
_FREQUENCY_BYTES = 1024  # more than 256 codes of 29 bits, and 15
_NOTABLE = 100  # coding by symbols is tried where frequencies take more than 1 / _NOTABLE of a message


def symbols_together(levels: int) -> int:
    """Return the number of symbols in a super-symbol; ValueError if `levels` is out of range."""
    if not 2 <= levels <= MOST_LEVELS:
        raise ValueError(f"entropy coding takes symbols of 2 to {MOST_LEVELS} levels, not {levels}")
    together = 1
    while levels ** (together + 1) <= 256:
        together += 1
    return together


def most_bytes(n: int, levels: int) -> int:
    """Return the size of the longest payload of `n` symbols."""
    return _MODE_BYTES + -(-n // symbols_together(levels))


def encode(symbols: Bytes, levels: int, payload: Bytes) -> int:
    """Code symbols below `levels` at the beginning of the payload; return the message's bytes."""
    # the bytes behind the message are undefined
    most = most_bytes(symbols.size, levels)
    if payload.size < most:
        raise ValueError(f"{symbols.size} symbols of {levels} levels may take {most} bytes, not {payload.size}")
    together, states = _shape(symbols.size, levels)
    packed, counts = _group_symbols(symbols, levels, together)
    used = _code(packed, counts[: levels**together], levels, together, states, payload[:most])
    if used:
        return used
    payload[0] = PLAIN
    if together < symbols_together(levels):
        packed, _ = _group_symbols(symbols, levels, symbols_together(levels))
    payload[_MODE_BYTES:most] = packed
    return most


def decode(payload: Bytes, levels: int, symbols: Bytes) -> None:
    """Decode the symbols of a message, without the bytes behind it; ValueError and zeros if it is damaged."""
    # symbols are below `levels` even where damage goes undetected
    n, together, states = symbols.size, symbols_together(levels), 0
    if payload.size and payload[0] in (CODED, BY_SYMBOLS):
        together, states = _shape(n, levels)
    packed = symbols if together == 1 else np.empty(-(-n // together), np.uint8)
    sound = False
    if states and n:
        sound = _uncode(payload, levels, together, states, packed)
    elif payload.size == _MODE_BYTES + packed.size and payload[0] == PLAIN:
        packed[:] = payload[_MODE_BYTES:]
        sound = int(packed.max(initial=0)) < levels**together
    if not sound:
        symbols[:] = 0
        raise ValueError(f"a payload of {n} symbols of {levels} levels, of {payload.size} bytes, is damaged")
    if together > 1:
        rans.ungroup(packed, _digits(levels), together, symbols)


def _shape(n: int, levels: int) -> tuple[int, int]:
    """Return the symbols in a super-symbol, and the states, of a coded message of `n` symbols."""
    return (1, 1) if n <= SHORT else (symbols_together(levels), _STATES)


def _group_symbols(symbols: Bytes, levels: int, together: int) -> tuple[Bytes, Indices]:
    """Return the super-symbols, and the count of each of 256. Raises ValueError for a symbol not below `levels`."""
    places, whole = _places(levels, together), symbols.size // together
    packed, counts = np.empty(-(-symbols.size // together), np.uint8), np.zeros((4, 256), np.int64)
    largest = int(rans.group(symbols, places, packed[:whole], counts))
    if whole < packed.size:
        last = np.zeros(together, np.uint8)
        rest = symbols[whole * together :]
        last[: rest.size] = rest
        largest = max(largest, int(rans.group(last, places, packed[whole:], counts)))
    if largest >= levels:
        raise ValueError(f"a symbol is {largest}, but there are {levels} levels: symbols are 0 to {levels - 1}")
    return packed, counts.sum(axis=0)


def _bits(n_packed: int) -> int:
    """Return b: frequencies add up to 2^b, at least the number of super-symbols that occur."""
    return min(rans.MOST_BITS, n_packed.bit_length())


def _code(packed: Bytes, counts: Indices, levels: int, together: int, states: int, payload: Bytes) -> int:
    """Write a coded message; return its bytes, or 0 if it does not fit."""
    if not packed.size:
        return 0
    mode, bits = CODED, _bits(packed.size)
    frequencies, written = np.empty_like(counts), np.empty(_FREQUENCY_BYTES, np.uint8)
    rans.normalise(counts, bits, frequencies)
    taken = int(rans.write_frequencies(frequencies, written))
    if together > 1 and _NOTABLE * taken > (length := rans.coded_bits(counts, frequencies, bits) / 8):
        of_symbols = _of_symbols(counts, levels, together, packed.size)
        others, rewritten = _by_symbols(of_symbols, levels, together, packed.size), np.empty_like(written)
        retaken = int(rans.write_frequencies(of_symbols, rewritten))
        # naming super-symbols lowers the frequencies of symbols; if one that occurs drops to 0, the length is infinite
        if retaken + rans.coded_bits(counts, others, bits) / 8 < taken + length:
            mode, frequencies, written, taken = BY_SYMBOLS, others, rewritten, retaken
    frequencies_at = _MODE_BYTES + 4 * states
    words_at = frequencies_at + taken
    table, left = np.empty((counts.size, rans.ENCODER_COLUMNS), np.uint32), np.empty(states, np.uint64)
    rans.make_encoder(frequencies, bits, table)
    begin = int(rans.push(packed, table, words_at, payload, left))
    if begin < words_at:
        return 0
    used = words_at + payload.size - begin
    payload[0] = mode
    payload[_MODE_BYTES:frequencies_at] = left.astype("<u4").view(np.uint8)
    payload[frequencies_at:words_at] = written[:taken]
    payload[words_at:used] = payload[begin:]
    return used


def _of_symbols(counts: Indices, levels: int, together: int, n_packed: int) -> Indices:
    """Return the frequencies that a message "by symbols" of the wire format sends, given counts of super-symbols."""
    found, sent = np.zeros(levels, np.int64), np.zeros(levels + counts.size, np.int64)
    rans.count_symbols(counts, together, found)
    rans.normalise(found, _bits(n_packed), sent[:levels])
    expected = _derive_frequencies(sent[:levels], counts.size, together, n_packed)
    sent[levels:] = (counts > 0) & (expected == 0)
    sent[sent[:levels].argmax()] -= sent[levels:].sum()  # together 2^bits again
    return sent


def _by_symbols(sent: Indices, levels: int, together: int, n_packed: int) -> Indices:
    """Return the frequencies of super-symbols: the expected ones, and at least 1 for those that are named."""
    frequencies = np.empty(sent.size - levels, np.int64)
    expected = _derive_frequencies(sent[:levels], frequencies.size, together, n_packed)
    expected += sent[levels:] > 0
    rans.normalise(expected, _bits(n_packed), frequencies)
    return frequencies


def _derive_frequencies(symbols: Indices, alphabet: int, together: int, n_packed: int) -> Indices:
    """Return the probability of each super-symbol if symbols are independent and have these frequencies."""
    found = np.empty(alphabet, np.int64)
    rans.expect(symbols, together, _bits(n_packed), n_packed, found)
    return found


def _uncode(payload: Bytes, levels: int, together: int, states: int, packed: Bytes) -> bool:
    """Read a coded message; return whether it was undamaged."""
    bits, frequencies_at = _bits(packed.size), _MODE_BYTES + 4 * states
    by_symbols = payload[0] == BY_SYMBOLS
    if by_symbols and together == 1:
        return False
    frequencies = np.empty(levels**together + levels * by_symbols, np.int64)
    words_at = int(rans.read_frequencies(payload, frequencies_at, bits, frequencies))
    if words_at < 0:
        return False
    if by_symbols:
        frequencies = _by_symbols(frequencies, levels, together, packed.size)
    held = payload[_MODE_BYTES:frequencies_at].copy().view("<u4").astype(np.uint64)
    slots, ranges = np.empty(1 << bits, np.uint8), np.empty((256, 2), np.uint32)
    rans.make_decoder(frequencies, slots, ranges)
    end = int(rans.pull(payload, words_at, held, slots, ranges, bits, packed))
    return end == payload.size and bool((held == rans.LOWEST).all())


@lru_cache(maxsize=2 * MOST_LEVELS)
def _places(levels: int, together: int) -> tuple[int, ...]:
    """Return the place value of each symbol of a super-symbol."""
    return tuple(levels**place for place in reversed(range(together)))


@lru_cache(maxsize=MOST_LEVELS)
def _digits(levels: int) -> Bytes:
    """Return uint8[256 * 16]: the symbols of each super-symbol, padded with zeros."""
    digits = np.zeros((256, 16), np.uint8)
    every = np.arange(256)
    for column, place in enumerate(_places(levels, symbols_together(levels))):
        digits[:, column] = every // place % levels
    return digits.reshape(-1)
