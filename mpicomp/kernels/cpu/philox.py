"""Counter-based random words: Philox4x32-7, and words whose bits are 1 with a given probability.

Philox4x32 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) with 7 rounds, the fewest
that the paper found to pass BigCrush; 10 rounds cost 1.4 times as much, and drawing is the cost of a merge.

Layout. A *group* is 512 elements, 8 words of 64 bits. Draw `d` of group `g` is four Philox blocks:
block l has the counter (4 g + l mod 2^32, d + 2^8 (4 g + l div 2^32), step, rank + 2^20 merge ordinal), and its output
x0 .. x3 gives word l of the group as x0 + 2^32 x1 and word 4 + l as x2 + 2^32 x3.

Bits of probability p come four at a time by Walker's alias method (Walker, Electronics Letters 10(8), 1974): each half
byte of draw 0 is a cell; the byte in the same place of draw 1 (low half bytes) or 2 (high ones) is compared with the
cell's threshold: below it the cell itself is the outcome, above it the cell's alias. On equality, one case in 256, the
threshold's next 32 bits are compared with output x0 of another block. Its counter is (h mod 2^32, 3 + 2^8 (h div 2^32),
step, source), h the half byte's number in the whole vector. That takes 3.03 random words per 64 elements; comparing bit
planes takes 7.4 to 10.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import as_bytes, as_words, first_halves, join, lookup, second_halves, to_bits
from mpicomp.kernels.cpu.simd import iota, load_bytes, load_words, select, splat_like, splat_word, store

MULTIPLIER_0, MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
NIBBLE = np.uint64(15)


@njit(nogil=True)
def load_keys(schedule):
    """Return the seven rounds' key words as vectors; arrays would be reference-counted in the inner loops."""
    return (
        load_words(schedule, 0), load_words(schedule, 4), load_words(schedule, 8), load_words(schedule, 12),
        load_words(schedule, 16), load_words(schedule, 20), load_words(schedule, 24), load_words(schedule, 28),
        load_words(schedule, 32), load_words(schedule, 36), load_words(schedule, 40), load_words(schedule, 44),
        load_words(schedule, 48), load_words(schedule, 52),
    )  # fmt: skip


@njit(nogil=True)
def load_keys_of_two(schedule):
    """Return the key words for `draw_two`."""
    a = load_keys(schedule)
    return (
        join(a[0], a[0]), join(a[1], a[1]), join(a[2], a[2]), join(a[3], a[3]), join(a[4], a[4]), join(a[5], a[5]),
        join(a[6], a[6]), join(a[7], a[7]), join(a[8], a[8]), join(a[9], a[9]), join(a[10], a[10]),
        join(a[11], a[11]), join(a[12], a[12]), join(a[13], a[13]),
    )  # fmt: skip


@njit(nogil=True)
def _round(x, key_0, key_1):
    low, half = splat_like(LOW, key_0), splat_like(HALF, key_0)
    p0 = x[0] * splat_like(MULTIPLIER_0, key_0)
    p1 = x[2] * splat_like(MULTIPLIER_1, key_0)
    return ((p1 >> half) ^ key_0 ^ x[1]) & low, p1 & low, ((p0 >> half) ^ key_1 ^ x[3]) & low, p0 & low


@njit(nogil=True)
def _counters(group, number):
    """Return the first two counter words of the four blocks of a draw."""
    block = uint64(4) * group
    return iota(block) & splat_word(LOW), splat_word(number | ((block >> HALF) << uint64(8)))


@njit(nogil=True)
def _rounds(keys, x0, x1, step, source):
    x = (x0, x1, splat_like(step, x0), splat_like(source, x0))
    x = _round(x, keys[0], keys[1])
    x = _round(x, keys[2], keys[3])
    x = _round(x, keys[4], keys[5])
    x = _round(x, keys[6], keys[7])
    x = _round(x, keys[8], keys[9])
    x = _round(x, keys[10], keys[11])
    x = _round(x, keys[12], keys[13])
    half = splat_like(HALF, x0)
    return x[0] | (x[1] << half), x[2] | (x[3] << half)


@njit(nogil=True)
def draw(keys, group, number, step, source):
    """Return words 0 .. 3 and 4 .. 7 of draw `number` of a group."""
    x0, x1 = _counters(group, number)
    return _rounds(keys, x0, x1, step, source)


@njit(nogil=True)
def draw_two(keys, group, number, other_group, other_number, step, source):
    """Return words 0 .. 7 of one draw, and of another: vectors of 512 bits take half the time of two `draw`.

    keys : from `load_keys_of_two`.
    """
    x0, x1 = _counters(group, number)
    y0, y1 = _counters(other_group, other_number)
    low, high = _rounds(keys, join(x0, y0), join(x1, y1), step, source)
    return first_halves(low, high), second_halves(low, high)


@njit(nogil=True)
def single(schedule, first, number, step, source):
    """Return output x0 of one block."""
    x0, x1, x2, x3 = first & LOW, number | ((first >> HALF) << uint64(8)), step, source
    for r in range(7):
        p0, p1 = x0 * MULTIPLIER_0, x2 * MULTIPLIER_1
        x0, x1 = (p1 >> HALF) ^ schedule[8 * r] ^ x1, p1 & LOW
        x2, x3 = (p0 >> HALF) ^ schedule[8 * r + 4] ^ x3, p0 & LOW
    return x0


@njit(nogil=True)
def _choose(cells, draws, aliases, thresholds):
    """Return the outcomes of 32 cells (a tie takes the cell itself), and the bits of those that tie."""
    threshold = lookup(thresholds, cells)
    return select(draws > threshold, lookup(aliases, cells), cells), to_bits(draws == threshold)


@njit(nogil=True)
def _settle(schedule, first_group, step, source, table, rest, ties, tied_sets, out):
    """Decide the tied half bytes by 32 more bits each. Sets with ties are listed first: no branch to mispredict."""
    found = 0
    for set_of_32 in range(out.size // 2):
        tied_sets[found] = set_of_32
        found += ties[set_of_32] != 0
    for i in range(found):
        set_of_32 = tied_sets[i]
        tied = ties[set_of_32]
        high = set_of_32 & uint64(1)
        while tied:
            byte = uint64(trailing_zeros(tied))
            tied &= tied - uint64(1)
            word = uint64(2) * (set_of_32 - high) + (byte >> uint64(3))
            nibble = uint64(16) * (uint64(8) * first_group + word) + uint64(2) * (byte & uint64(7)) + high
            place = uint64(8) * (byte & uint64(7)) + uint64(4) * high
            cell = (out[word] >> place) & NIBBLE
            if single(schedule, nibble, uint64(3), step, source) >= rest[cell]:
                out[word] ^= (cell ^ uint64(table[cell])) << place


@njit(nogil=True)
def _fill(keys, first_group, number, step, source, out):
    """Fill `out` with the words of draw `number`. keys : from `load_keys_of_two`."""
    groups = out.size // 8
    for g in range(0, groups, 2):
        group = first_group + uint64(g)
        words, others = draw_two(keys, group, number, group + uint64(1), number, step, source)
        store(out, 8 * g, words)
        if g + 1 < groups:
            store(out, 8 * g + 8, others)


@njit(nogil=True)
def _select(table, low_draws, high_draws, ties, out):
    """Turn cells, in `out`, into outcomes, and write the bits of those that tie to `ties`."""
    aliases, thresholds = load_bytes(table, 0), load_bytes(table, 32)
    nibbles, four = splat_word(NIBBLES), splat_word(uint64(4))
    for j in range(out.size // 4):
        cells = load_words(out, 4 * j)
        low, high = as_bytes(load_words(low_draws, 4 * j)), as_bytes(load_words(high_draws, 4 * j))
        even, tie_even = _choose(as_bytes(cells & nibbles), low, aliases, thresholds)
        odd, tie_odd = _choose(as_bytes((cells >> four) & nibbles), high, aliases, thresholds)
        ties[2 * j], ties[2 * j + 1] = tie_even, tie_odd
        store(out, 4 * j, as_words(even) | (as_words(odd) << four))


@kernel
def draw_words(schedule, first_group, step, source, table, rest, scratch, out):
    """Draw random words of the groups from `first_group` on; each bit is 1 with the probability of the table.

    schedule : uint64[56]. step, source : uint64 counter words. table : uint8[64], the aliases of the 16 cells twice
    in a row, then their threshold bytes likewise. rest : uint64[16], the thresholds' next 32 bits; empty if every cell
    is its own outcome (p = 1/2). scratch : uint64[24 t], for t groups at a time; best in the first-level cache.
    out : uint64[8 k].
    """
    keys = load_keys_of_two(schedule)
    if rest.size == 0:
        _fill(keys, first_group, uint64(0), step, source, out)
        return
    tile = scratch.size // 24
    for start in range(0, out.size // 8, tile):
        groups = min(tile, out.size // 8 - start)
        first = first_group + uint64(start)
        words = out[8 * start : 8 * (start + groups)]
        low, high = scratch[: 8 * groups], scratch[8 * tile : 8 * (tile + groups)]
        ties = scratch[16 * tile : 20 * tile]
        _fill(keys, first, uint64(0), step, source, words)
        _fill(keys, first, uint64(1), step, source, low)
        _fill(keys, first, uint64(2), step, source, high)
        _select(table, low, high, ties, words)
        _settle(schedule, first, step, source, table, rest, ties, scratch[20 * tile :], words)


@kernel
def merge_words(words, incoming, held):
    """Compute held = (incoming AND words) OR (held AND NOT words), in place; all uint64[k]."""
    for j in range(held.size):
        held[j] ^= (held[j] ^ incoming[j]) & words[j]
