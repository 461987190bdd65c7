"""Layouts of nodes, and the communicators of both levels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from collectives import CollectiveMismatch, Communicator
from collectives.communicator.nodes import layout_of_parts
from collectives.nodes.layout import NodeLayout
from mpicomp import run_local


def of(*node_of: int) -> list[NodeLayout]:
    return [NodeLayout(node_of, rank) for rank in range(len(node_of))]


def test_nodes_are_numbered_in_the_order_of_their_lowest_ranks() -> None:
    layout = NodeLayout.of_keys(["b", "a", "b", "c", "a"], 4)
    assert layout.node_of == (0, 1, 0, 2, 1)
    assert layout.sizes == (2, 2, 1)
    assert (layout.node, layout.local_rank, layout.members) == (1, 1, (1, 4))
    assert layout.places == (0, 0, 1, 0, 1)
    assert layout.n_shards == 1


def test_counterparts_are_those_of_the_nodes_that_have_them() -> None:
    assert [one.counterparts for one in of(0, 0, 0, 1, 2, 2)] == [(0, 3, 4), (1, 5), (2,), (0, 3, 4), (0, 3, 4), (1, 5)]


def test_layouts_of_other_ranks_differ() -> None:
    first, second, *_ = of(0, 0, 1)
    assert first == NodeLayout((0, 0, 1), 0)
    assert len({first, second, NodeLayout((0, 0, 1), 0)}) == 2


def sizes(comm: Communicator) -> Any:
    return comm.layout.sizes, comm.layout.members


@pytest.mark.parametrize(
    ("ranks", "per", "expected"), [(3, 2, (2, 1)), (6, 3, (3, 3)), (3, 1, (1, 1, 1)), (2, 9, (2,))]
)
def test_groups_of_neighbouring_ranks_are_nodes(ranks: int, per: int, expected: tuple[int, ...]) -> None:
    assert {one[0] for one in run_local(ranks, sizes, ranks_per_node=per)} == {expected}


def test_parts_of_a_communicator_keep_its_nodes() -> None:
    def work(comm: Communicator) -> Any:
        nodes = comm.nodes
        with comm.split(comm.rank // 3) as part, comm.grid(row=2, column=3) as grid:
            row, column = grid.along("column"), grid.along("row")
            found = [one.layout.sizes for one in (nodes.local, nodes.across, part, row, column)]
            return [*found, part.nodes.local.size, nodes.across.nodes.local.size]

    # of nodes (0, 1), (2, 3), (4, 5), ranks 0 to 2 and 3 to 5 have parts
    found = run_local(6, work, ranks_per_node=2)
    assert found[0] == [(2,), (1, 1, 1), (2, 1), (2, 1), (1, 1), 2, 1]
    assert found[3] == [(2,), (1, 1, 1), (1, 2), (1, 2), (1, 1), 1, 1]


def test_parts_that_a_rank_describes_otherwise_are_refused() -> None:
    def work(comm: Communicator) -> None:
        part = comm.split(0, -comm.rank)  # in the reverse order
        with part, pytest.raises(ValueError, match=r"rank 0 is number 2 of the 3 ranks of its part"):
            layout_of_parts(comm, part)

    run_local(3, work)


@pytest.mark.parametrize("options", [{}, {"checksums": True}, {"link": "1gbit"}, {"checksums": True, "link": "1gbit"}])
def test_parts_are_read_without_a_call_of_theirs(options: dict[str, Any]) -> None:
    def work(comm: Communicator) -> Any:
        part = comm.split(comm.rank % 2)
        number = part.calls.next_tag()
        found = layout_of_parts(comm, part).node_of
        assert part.calls.next_tag() == number + 1
        return found

    assert set(run_local(5, work, **options)) == {(0, 1, 0, 1, 0)}


def test_a_part_with_ranks_of_others_is_refused() -> None:
    def work(comm: Communicator) -> None:
        whole = comm.split(0)
        with comm.split(comm.rank // 2) as part:
            if comm.rank == 2:
                assert layout_of_parts(part, part).sizes == (1,)
            with pytest.raises(ValueError, match=r"rank 0 is number \d of the 3 ranks of its part"):
                layout_of_parts(part, whole)

    run_local(3, work)


def test_parts_are_those_of_the_survivors_of_a_death_in_the_call_that_reads_them() -> None:
    """A call that had ended on a survivor has the dead rank's answer, too."""

    def work(comm: Communicator) -> Any:
        with comm.split(comm.rank // 2) as part:

            def gather(mine: Any) -> Any:
                found, left.members = comm.allgather_object(mine), (0, 2, 3)
                left.rank = sum(one < comm.rank for one in left.members)
                return found

            left = SimpleNamespace(
                members=(0, 1, 2, 3), rank=comm.rank, mpi_comm=comm.mpi_comm, recovery=comm, allgather_object=gather
            )
            return layout_of_parts(left, part).node_of  # type: ignore[arg-type]

    assert set(run_local(4, work)) == {(0, 1, 1)}


def test_nodes_are_closed_with_their_communicator() -> None:
    def work(comm: Communicator) -> Any:
        nodes = comm.nodes
        assert comm.nodes is nodes
        comm.close()
        return nodes.local.calls.reason, nodes.across.calls.reason

    assert set(run_local(4, work, ranks_per_node=2)) == {("it was closed", "it was closed")}


def test_a_rank_that_does_not_make_nodes_is_a_mismatch_on_the_others() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(CollectiveMismatch, match="split"):
            comm.barrier() if comm.rank == 1 else comm.nodes

    run_local(3, work, ranks_per_node=2)
