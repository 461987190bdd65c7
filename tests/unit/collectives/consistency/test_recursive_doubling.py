"""Recursive doubling: pairs of ranks, and sums that are equal on all ranks."""

from __future__ import annotations

import pytest

from collectives.consistency.recursive_doubling import MOST_BYTES_IN_A_NODE, Swap, most_bytes, rounds_of

SIZES = range(1, 34)


def sums(size: int) -> list[str]:
    """The sum that each rank ends with, as a formula."""
    rounds = [rounds_of(rank, size) for rank in range(size)]
    held, at, under_way = [f"x{rank}" for rank in range(size)], [0] * size, {}
    sent = [-1] * size
    while any(at[rank] < len(rounds[rank]) for rank in range(size)):
        before = list(at)
        for rank in range(size):
            if at[rank] == len(rounds[rank]):
                continue
            here = rounds[rank][at[rank]]
            if here.sends and sent[rank] < at[rank]:
                under_way.setdefault((rank, here.peer), []).append(held[rank])
                sent[rank] = at[rank]
                before[rank] = -1
            if here.receives:
                queue = under_way.get((here.peer, rank))
                if not queue:
                    continue
                landed = queue.pop(0)
                pair = (landed, held[rank]) if here.peer_first else (held[rank], landed)
                held[rank] = landed if here.final else f"({pair[0]} + {pair[1]})"
            at[rank] += 1
        assert at != before, f"ranks wait for each other: {at}"
    assert not any(under_way.values()), "a message that nobody takes"
    return held


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_evaluates_the_same_formula_with_everybody_once_in_rank_order(size: int) -> None:
    formulas = sums(size)
    assert len(set(formulas)) == 1
    assert formulas[0].replace("(", "").replace(")", "") == " + ".join(f"x{rank}" for rank in range(size))


def test_four_ranks_add_in_pairs() -> None:
    assert sums(4)[3] == "((x0 + x1) + (x2 + x3))"


@pytest.mark.parametrize("size", SIZES)
def test_there_are_as_few_rounds_as_possible(size: int) -> None:
    doublings = size.bit_length() - 1
    longest = max(len(rounds_of(rank, size)) for rank in range(size))
    assert longest == doublings + (2 if size > 1 << doublings else 0)


def test_who_is_too_many_hands_over_and_waits() -> None:
    assert rounds_of(1, 3) == [Swap(0, True, False), Swap(0, False, True, final=True)]


def test_many_ranks_sum_less_this_way() -> None:
    assert most_bytes(2, True) == MOST_BYTES_IN_A_NODE
    assert most_bytes(3, True) == most_bytes(4, True) == most_bytes(2, True) // 2
    for size in SIZES[1:]:
        sent = max(sum(one.sends for one in rounds_of(rank, size)) for rank in range(size))
        assert sent * most_bytes(size, True) <= MOST_BYTES_IN_A_NODE
    assert most_bytes(1000, False) % 64 == 0
