"""Every method over MPI equals its one-process simulation to the bit, however it is cut, whenever it arrives.

Other numbers of ranks are those of threads, in `tests/unit/algorithms/test_algorithms_exact.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi4py import MPI

from mpicomp.algorithms import ALGORITHMS
from tests.exact import ONE_BLOCK, check_over_mpi, of_each_topology
from tests.mpi.conftest import go_in_parts
from tests.trials import TRIALS

pytestmark = pytest.mark.timeout(240)


def test_every_method_is_tried() -> None:
    assert {name.split(",")[0] for name in TRIALS} == set(ALGORITHMS)


@pytest.mark.parametrize("name", TRIALS)
def test_results_and_states_are_those_of_one_process(
    mpi_comm: MPI.Intracomm, name: str, jitter: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks, and short vectors at once; or the shortest pieces and buffers, and messages in any order."""
    trials = TRIALS[name](mpi_comm.size)
    check_over_mpi(mpi_comm, trials, None)
    go_in_parts(monkeypatch)
    jitter(mpi_comm.rank)
    check_over_mpi(mpi_comm, of_each_topology(trials), ONE_BLOCK, mpi_comm.size)
