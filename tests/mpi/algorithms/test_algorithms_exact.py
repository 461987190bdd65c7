"""Every method over MPI equals its one-process simulation to the bit, however it is cut, whenever it arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi4py import MPI

from mpicomp.algorithms import ALGORITHMS
from tests.exact import ONE_BLOCK, check_over_mpi
from tests.mpi.conftest import go_in_parts
from tests.mpi.lanes import every_size
from tests.trials import TRIALS

# Ranks that try all trials: as whole chunks, and cut into the shortest pieces, as threads do on 3 ranks.
ALL_WHOLE, ALL_CUT = (1, 3), (1, 4)
# Ranks that try whole chunks of each topology; tests/mpi/test_fixtures.py has those of 5 and 8 ranks.
WHOLE = (1, 2, 3)
pytestmark = pytest.mark.timeout(240)


def test_every_method_is_tried() -> None:
    assert {name.split(",")[0] for name in TRIALS} == set(ALGORITHMS)


@every_size
@pytest.mark.parametrize("name", TRIALS)
def test_results_and_states_are_those_of_one_process(
    mpi_comm: MPI.Intracomm, name: str, jitter: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks, and short vectors at once; or the shortest pieces and buffers, and messages in any order.

    Numbers of ranks change the plans: a lane tries one trial of each topology, and all trials where the number of
    ranks is in `ALL_WHOLE` or `ALL_CUT`. Pieces are worked on by one thread or by several.
    """
    size = mpi_comm.size
    trials = TRIALS[name](size)
    of_each_topology = [*{topology: (trial, topology) for trial, topology in reversed(trials)}.values()]
    if size in WHOLE:
        check_over_mpi(mpi_comm, trials if size in ALL_WHOLE else of_each_topology, None)
    go_in_parts(monkeypatch)
    jitter(mpi_comm.rank)
    threads = 1 if size == 2 else 3 if size == 3 else 2
    check_over_mpi(mpi_comm, trials if size in ALL_CUT else of_each_topology, ONE_BLOCK, threads)
