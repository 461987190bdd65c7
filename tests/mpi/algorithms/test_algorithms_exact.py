"""Every method over MPI equals its one-process simulation to the bit, however it is cut, whenever it arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi4py import MPI

from mpicomp.algorithms import ALGORITHMS
from tests.exact import ONE_BLOCK, check_over_mpi
from tests.mpi.conftest import go_in_parts
from tests.mpi.lanes import PARTS, every_size
from tests.trials import TRIALS

FEW = 2, 3  # ranks
pytestmark = pytest.mark.timeout(240)


def test_every_method_is_tried() -> None:
    assert {name.split(",")[0] for name in TRIALS} == set(ALGORITHMS)


@every_size
@pytest.mark.parametrize("name", TRIALS)
def test_results_and_states_are_those_of_one_process(
    mpi_comm: MPI.Intracomm, name: str, jitter: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks, and short vectors at once; then the shortest pieces and buffers, and messages in any order.

    On some ranks these pieces are worked on by one thread and by several.

    What numbers of ranks change is the plans: but on few ranks, one trial of each topology is enough for the first, and
    on parts of a lane for the second too.
    """
    size = mpi_comm.size
    trials = TRIALS[name](size)
    of_each_topology = [*{topology: (trial, topology) for trial, topology in reversed(trials)}.values()]
    if size not in PARTS:
        check_over_mpi(mpi_comm, trials if size in FEW else of_each_topology, None)
    go_in_parts(monkeypatch)
    jitter(mpi_comm.rank)
    if size in FEW:
        check_over_mpi(mpi_comm, of_each_topology, ONE_BLOCK, threads=3)
    check_over_mpi(mpi_comm, of_each_topology if size in PARTS else trials, ONE_BLOCK, threads=1 if size in FEW else 2)
