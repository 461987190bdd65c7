"""Lengths of the messages of dense sums."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import Communicator, HalvingDoubling, Ring, Tree
from collectives.dense.allreduce import NODE_PIECE_BYTES, PIECE_BYTES, SHORT_BYTES, sum_program
from collectives.schedules.plan import Topology
from collectives.threads.run_local import run_local

CHUNK_BYTES = 2 * NODE_PIECE_BYTES  # a multiple of every length below
ALMOST = SHORT_BYTES - 512


def longest(
    ranks: int, topology: Topology, eager_bytes: int, one_node: bool = False, piece_bytes: int | None = None
) -> int:
    """Bytes of the longest message of a sum of float64 along a plan, on hosts with this eager limit."""

    def made(comm: Communicator) -> int:
        comm.one_node, comm.routes.eager_bytes = one_node, eager_bytes
        vector = np.zeros(comm.size * CHUNK_BYTES // 8)
        program = sum_program(comm, vector.size, vector.itemsize, short=False)
        return program.longest_piece * vector.itemsize

    (nbytes,) = set(run_local(ranks, made, topology, piece_bytes=piece_bytes))
    return nbytes


@pytest.mark.parametrize(
    ("ranks", "topology"),
    [(2, Ring()), (2, Tree()), (2, HalvingDoubling()), (4, HalvingDoubling())],
    ids=lambda of: getattr(of, "name", of),
)
@pytest.mark.parametrize("eager_bytes", [SHORT_BYTES, 2 * SHORT_BYTES])
def test_hosts_that_swap_messages_do_so_without_a_hand_shake(ranks: int, topology: Topology, eager_bytes: int) -> None:
    assert longest(ranks, topology, eager_bytes) == eager_bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_they_take_long_messages_where_those_without_would_be_short(ranks: int) -> None:
    assert longest(ranks, HalvingDoubling(), ALMOST) == PIECE_BYTES


@pytest.mark.parametrize("ranks", [3, 4])
def test_around_a_ring_nobody_swaps(ranks: int) -> None:
    assert longest(ranks, Ring(), SHORT_BYTES) == PIECE_BYTES


@pytest.mark.parametrize(("ranks", "topology"), [(2, Ring()), (4, HalvingDoubling())])
def test_on_one_node_messages_are_longer(ranks: int, topology: Topology) -> None:
    assert longest(ranks, topology, SHORT_BYTES, one_node=True) == NODE_PIECE_BYTES


@pytest.mark.parametrize("one_node", [False, True])
@pytest.mark.parametrize(("ranks", "topology"), [(2, Ring()), (4, Ring()), (4, HalvingDoubling())])
def test_a_length_that_was_asked_for_is_taken(ranks: int, topology: Topology, one_node: bool) -> None:
    assert longest(ranks, topology, SHORT_BYTES, one_node, piece_bytes=1 << 16) == 1 << 16
