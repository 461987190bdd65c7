"""Shared selection in plain NumPy, element by element."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.streams import Stream, bernoulli_table, source
from tests.reference import philox
from tests.reference.signs import pack_bits, unpack_bits

COLUMNS = 512  # of a row
ROW = COLUMNS // 64  # words

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]


def draw_labels(key: tuple[int, int], first_group: int, groups: int, step: int, ranks: int) -> Numbers:
    """Label of every column of so many groups: [512 groups], each in 0 .. ranks - 1."""
    labels = np.zeros(COLUMNS * groups, np.int64)
    undecided = np.ones(labels.size, bool)
    m, weight, s = ranks, 1, 0
    while m > 1:
        table = bernoulli_table(1, m - 1) if m % 2 else bernoulli_table(1, 1)
        words = philox.mix_words(key, first_group, groups, step, int(source(0, s)), *table)
        drawn = unpack_bits(words, labels.size) & undecided
        if m % 2:
            m -= 1
            labels[drawn] += weight * m
            undecided &= ~drawn
        else:
            m //= 2
            labels[drawn] += weight
            weight *= 2
        s += 1
    return labels


def draw_distances(key: tuple[int, int], first_group: int, groups: int, step: int, ranks: int) -> Numbers:
    """Distance from the first winner to the second, of each group: in 1 .. ranks - 1."""
    steps, m = 0, ranks
    while m > 1:
        steps, m = steps + 1, m - 1 if m % 2 else m // 2
    found = []
    for g in range(first_group, first_group + groups):
        counter = (g & philox.MASK, g >> 32 << 8, step, int(source(0, steps)))
        found.append(1 + (philox.philox(counter, key)[0] * (ranks - 1) >> 32))
    return np.array(found, np.int64)


class Places:
    """Where the elements of a vector lie in groups: for each element its group, its row, and its bit in a payload."""

    def __init__(self, n: int, ranks: int) -> None:
        words = -(-n // 64)
        word = np.arange(words)
        group = word // (ROW * ranks)
        inside = word % (ROW * ranks)
        left = words - ROW * ranks * group
        width = np.minimum(ROW, -(-left // ranks))  # words in a row of this word's group
        self.words = -(-words // ranks)
        self.groups = -(-self.words // ROW)
        self.group = np.repeat(group, 64)[:n]
        self.row = np.repeat(inside // width, 64)[:n]
        self.place = (64 * (ROW * group + inside % width)[:, None] + np.arange(64)).reshape(-1)[:n]


def winners(n: int, ranks: int, votes: int, stream: Stream, step: int, first: int = 0) -> Numbers:
    """The ranks that win each element of a run of `n` from element `first` on: [votes, n]."""
    votes, places, key = min(votes, ranks), Places(n, ranks), stream.key()
    found = np.empty((votes, n), np.int64)
    labels, distances = np.zeros(COLUMNS * places.groups, np.int64), np.ones(places.groups, np.int64)
    first_group = first // (COLUMNS * ranks)
    if votes < ranks:
        labels = draw_labels(key, first_group, places.groups, step, ranks)
        distances = draw_distances(key, first_group, places.groups, step, ranks) if votes == 2 else distances
    for vote in range(votes):
        found[vote] = (labels[places.place] + places.row + vote * distances[places.group]) % ranks
    return found


def payload(positive: NDArray[np.bool_], rank: int, who: Numbers, ranks: int) -> Words:
    """What a rank sends of its signs."""
    places = Places(positive.size, ranks)
    sent = np.zeros((len(who), 64 * places.words), bool)
    for vote, of_elements in enumerate(who):
        mine = of_elements == rank
        sent[vote, places.place[mine]] = positive[mine]
    return pack_bits(sent.reshape(-1))


def votes_of(positive: NDArray[np.bool_], who: Numbers) -> NDArray[np.bool_]:
    """The winners' signs, from those of all ranks [ranks, n]: [votes, n]."""
    return positive[who, np.arange(positive.shape[1])]
