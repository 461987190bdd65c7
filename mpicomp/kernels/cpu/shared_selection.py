"""Latin selection: all ranks draw the same winner of each element, so the losers' signs need not be sent.

Of M ranks, a *group* is M rows of 512 elements: 8 words of packed signs a row. The rows of a vector's last group are
shorter: of the w words that are left, each row has ceil(w / M), as far as they go. Each *column* of a group has a label
l, uniform in 0 .. M - 1. In row v the column is won by rank (l + v) mod M. So each rank wins every column exactly once,
and it sends one row a group. A second winner is the rank (l + v + d) mod M; the distance d is uniform in 1 .. M - 1
and belongs to the group.

Labels are bit planes: bit k of a column's label is the column's bit of plane k. A rank sends row (rank - l) mod M. A
tree of two-way choices finds it, a level a plane. Row v gets the payload of rank (l + v) mod M: the payloads are
rotated by 2^k rows where the bit of plane k is 1, one stage for each plane.

Draws. The words of group g's planes are those of group g in `mpicomp.kernels.cpu.philox`. With m = M and k = 0, draw
number s = 0, 1, 2, ... is as follows, until m is 1:

- m even: a fair bit becomes bit k of the label. Then m <- m / 2 and k <- k + 1.
- m odd: with probability 1/m, bits k, k + 1, ... of the label are those of m - 1, and the label is done. Otherwise
  m <- m - 1.

Draw s has source(0, s): it is the same on all ranks. The distance is 1 + floor(x (M - 1) / 2^32), where x is output x0
of the Philox block with the counter (g mod 2^32, 2^8 (g div 2^32), step, source(0, number of draws)). Where every rank
wins every element (M = 1, or M = 2 with two winners), nothing is drawn: labels are 0, distances 1.

A word of columns takes 1 random word with M = 2, 2 with M = 4, 4.03 with M = 3, 5.03 with M = 5 and 8.06 with M = 7.
Numbers of as many bits as M - 1 has, drawn again while they are M or more, take 7.8, 16 and 8.3 with M = 3, 5 and 7 and
a loop of unknown length: 3 to 11 times the time.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import to_mask
from mpicomp.kernels.cpu.philox import HALF, draw_words, single
from mpicomp.kernels.cpu.simd import LANES, WORDS, fence, load_words, put, select, splat, store

ROW = 8  # words
EVERY_BIT = np.uint64(0xFFFFFFFFFFFFFFFF)


@kernel
def draw_labels(schedule, first_group, step, sources, tables, rests, ranks, scratch, labels):
    """Draw labels of the groups from `first_group` on.

    Parameters
    ----------
    schedule : uint64[56]
    step : uint64
        Counter word.
    sources : uint64[draws]
        Counter words.
    tables, rests : uint8[odd m, 64], uint64[odd m, 16]
        Tables of probability 1/m for every odd m, in order: see `philox.draw_words`.
    ranks : int
        M.
    scratch : uint64[40 t]
        Working memory for t groups at a time.
    labels : uint64[planes * 8 * groups]
        Overwritten, plane by plane; with as many planes as M - 1 has bits.
    """
    planes = 0
    while (ranks - 1) >> planes:
        planes += 1
    if planes == 0:
        return
    pitch, tile = labels.size // planes, scratch.size // 40
    work, no_table, fair = scratch[: 24 * tile], tables.reshape(tables.size)[:0], rests.reshape(rests.size)[:0]
    for start in range(0, pitch, ROW * tile):
        count = min(ROW * tile, pitch - start)
        first = first_group + uint64(start // ROW)
        undecided, drawn = scratch[24 * tile : 24 * tile + count], scratch[32 * tile : 32 * tile + count]
        m, k, odd = ranks, 0, 0
        for s in range(sources.size):
            plane = labels[pitch * k + start : pitch * k + start + count]
            if m % 2:
                if odd == 0:
                    undecided[:] = EVERY_BIT
                    for later in range(k, planes):
                        labels[pitch * later + start : pitch * later + start + count] = 0
                draw_words(schedule, first, step, sources[s], tables[odd], rests[odd], work, drawn)
                for j in range(count):
                    drawn[j] &= undecided[j]
                    undecided[j] ^= drawn[j]
                m, odd = m - 1, odd + 1
                for later in range(k, planes):
                    if (m >> (later - k)) & 1:
                        at = pitch * later + start
                        for j in range(count):
                            labels[at + j] |= drawn[j]
                continue
            if odd:
                draw_words(schedule, first, step, sources[s], no_table, fair, work, drawn)
                for j in range(count):
                    plane[j] |= drawn[j] & undecided[j]
            else:
                draw_words(schedule, first, step, sources[s], no_table, fair, work, plane)
            m, k = m // 2, k + 1


@kernel
def draw_distances(schedule, first_group, step, source, ranks, distances):
    """Draw distances of the groups from `first_group` on; distances : int64[groups], overwritten."""
    for g in range(distances.size):
        x = single(schedule, first_group + uint64(g), uint64(0), step, source)
        distances[g] = 1 + int64((x * uint64(ranks - 1)) >> HALF)


@njit(nogil=True, inline="always")
def _choose(label, one, zero):
    return zero ^ ((zero ^ one) & label)


@njit(nogil=True)
def _select(words, labels, pitch, planes, distances, rank, ranks, scratch, payload):
    """Do `select_rows` for whole groups, 4 words of a row at a time; plane k begins at word `pitch` * k."""
    for g in range(payload.size // ROW):
        first = rank
        if distances is not None:
            first -= distances[g]
            if first < 0:
                first += ranks
        for i in range(ROW * g, ROW * (g + 1), WORDS):
            at, row = ROW * (ranks - 1) * g + i, first
            if planes == 0:
                store(payload, i, load_words(words, at + ROW * row))
                continue
            label = load_words(labels, i)
            for t in range(ranks // 2):
                zero = load_words(words, at + ROW * row)
                row = row - 1 if row else ranks - 1
                one = load_words(words, at + ROW * row)
                row = row - 1 if row else ranks - 1
                store(scratch, WORDS * t, _choose(label, one, zero))
            if ranks % 2:
                store(scratch, WORDS * (ranks // 2), load_words(words, at + ROW * row))
            count = ranks - ranks // 2
            for k in range(1, planes):
                label = load_words(labels, pitch * k + i)
                for t in range(count // 2):
                    zero, one = load_words(scratch, 2 * WORDS * t), load_words(scratch, 2 * WORDS * t + WORDS)
                    store(scratch, WORDS * t, _choose(label, one, zero))
                if count % 2:
                    store(scratch, WORDS * (count // 2), load_words(scratch, WORDS * (count - 1)))
                count -= count // 2
            store(payload, i, load_words(scratch, 0))


@njit(nogil=True)
def _select_all(words, labels, planes, distances, rank, ranks, scratch, payload):
    """Do `select_rows` for the first winners, or with `distances` for the second ones."""
    pitch, of_group = labels.size // max(planes, 1), ROW * ranks
    groups = words.size // of_group
    row, base = ROW * groups, of_group * groups
    _select(words, labels, pitch, planes, distances, rank, ranks, scratch, payload[:row])
    if base == words.size:
        return
    width = payload.size - row
    last, sent = scratch[of_group : 2 * of_group], scratch[2 * of_group : 2 * of_group + ROW]
    last[:] = 0
    for i in range(words.size - base):
        last[i // width * ROW + i % width] = words[base + i]
    left = None if distances is None else distances[groups:]
    _select(last, labels[row:], pitch, planes, left, rank, ranks, scratch, sent)
    for i in range(width):
        payload[row + i] = sent[i]


@kernel
def select_rows(words, labels, planes, distances, rank, ranks, scratch, payload):
    """Copy the signs of the elements that this rank wins.

    words : uint64[w], whole groups but for the last. labels : uint64[planes * 8 * groups]; planes : 0 where all labels
    are 0. distances : int64[groups], or None with one winner. scratch : uint64[16 * ranks + 8]. payload :
    uint64[votes * ceil(w / ranks)], overwritten.
    """
    size = (words.size + ranks - 1) // ranks
    _select_all(words, labels, planes, None, rank, ranks, scratch, payload[:size])
    if distances is not None:
        _select_all(words, labels, planes, distances, rank, ranks, scratch, payload[size:])


@njit(nogil=True)
def _scatter(payloads, stride, labels, pitch, planes, distances, ranks, scratch, bits):
    """Do `scatter_rows` for whole groups, 4 words of a row at a time; plane k begins at word `pitch` * k."""
    for g in range(bits.size // (ROW * ranks)):
        first = 0 if distances is None else distances[g]
        for i in range(ROW * g, ROW * (g + 1), WORDS):
            at, near = ROW * (ranks - 1) * g + i, first
            if planes == 0:
                for v in range(ranks):
                    store(bits, at + ROW * v, load_words(payloads, stride * near + i))
                    near = near + 1 if near + 1 < ranks else 0
                continue
            label, far = load_words(labels, i), near + 1 if near + 1 < ranks else 0
            if planes == 1:  # two ranks
                zero, one = load_words(payloads, stride * near + i), load_words(payloads, stride * far + i)
                store(bits, at, _choose(label, one, zero))
                store(bits, at + ROW, _choose(label, zero, one))
                continue
            zero = load_words(payloads, stride * near + i)
            for v in range(ranks):
                one = load_words(payloads, stride * far + i)
                store(scratch, WORDS * v, _choose(label, one, zero))
                zero, far = one, far + 1 if far + 1 < ranks else 0
            here, there = 0, WORDS * ranks
            for k in range(1, planes - 1):
                label, far = load_words(labels, pitch * k + i), 1 << k
                for v in range(ranks):
                    zero, one = load_words(scratch, here + WORDS * v), load_words(scratch, here + WORDS * far)
                    store(scratch, there + WORDS * v, _choose(label, one, zero))
                    far = far + 1 if far + 1 < ranks else 0
                here, there = there, here
            label, far = load_words(labels, pitch * (planes - 1) + i), 1 << (planes - 1)
            for v in range(ranks):
                zero, one = load_words(scratch, here + WORDS * v), load_words(scratch, here + WORDS * far)
                store(bits, at + ROW * v, _choose(label, one, zero))
                far = far + 1 if far + 1 < ranks else 0


@njit(nogil=True)
def _scatter_all(payloads, stride, labels, planes, distances, ranks, scratch, bits):
    """Do `scatter_rows` for the first winners, or with `distances` for the second ones."""
    pitch, of_group = labels.size // max(planes, 1), ROW * ranks
    groups = bits.size // of_group
    row, base = ROW * groups, of_group * groups
    _scatter(payloads, stride, labels, pitch, planes, distances, ranks, scratch, bits[:base])
    if base == bits.size:
        return
    width = (bits.size - base + ranks - 1) // ranks
    last, sent = scratch[of_group : 2 * of_group], scratch[2 * of_group :]
    for r in range(ranks):
        for i in range(width):
            sent[ROW * r + i] = payloads[stride * r + row + i]
    left = None if distances is None else distances[groups:]
    _scatter(sent, ROW, labels[row:], pitch, planes, left, ranks, scratch, last)
    for i in range(bits.size - base):
        bits[base + i] = last[i // width * ROW + i % width]


@kernel
def scatter_rows(payloads, stride, labels, planes, distances, ranks, scratch, first, second):
    """Move the signs of all ranks' payloads to their elements.

    payloads : uint64, rank r's from word `stride` * r on. scratch : uint64[24 * ranks]. first, second : uint64[w], the
    winners' signs, overwritten; `second` : None with one winner. Other arguments as in `select_rows`.
    """
    _scatter_all(payloads, stride, labels, planes, None, ranks, scratch, first)
    if distances is not None:
        seconds = payloads[(first.size + ranks - 1) // ranks :]
        _scatter_all(seconds, stride, labels, planes, distances, ranks, scratch, second)


@kernel
def unpack_pair(first, second, positive, zero, negative, streaming, out):
    """Set out[i] = positive where bit i is 1 in both, negative where it is 0 in both, else zero.

    first, second : uint64[ceil(n / 64)]. positive, zero, negative, streaming, out : as in `sign.unpack`.
    """
    p, o, m = splat(positive), splat(zero), splat(negative)
    words = out.size // 64
    for j in range(words):
        both, either = first[j] & second[j], first[j] | second[j]
        for k in range(0, 64, LANES):
            values = select(to_mask(both, k), p, select(to_mask(either, k), o, m))
            put(out, 64 * j + k, values, streaming)
    if streaming:
        fence()
    for i in range(64 * words, out.size):
        one = (first[words] >> uint64(i - 64 * words)) & uint64(1)
        other = (second[words] >> uint64(i - 64 * words)) & uint64(1)
        out[i] = zero if one != other else positive if one else negative
