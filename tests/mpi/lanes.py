"""Numbers of ranks and topologies that a test runs on, and agreement of the ranks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator, Torus
from collectives.consistency import missing_ranks
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TOPOLOGIES

if TYPE_CHECKING:
    from mpi4py import MPI

# How long the communicators of these tests wait for a silent rank.
TIMEOUT_S = 20.0
# Sizes whose plans powers of two hide, tried as parts of a lane of at least this many ranks.
PARTS = (5, 7)
PARTS_FROM = 8
# Marks a test, or a module, above the communicator that runs in all lanes, because a lone rank takes another way.
all_lanes = pytest.mark.all_lanes
# Marks a test, or a module, that runs on these parts too.
every_size = pytest.mark.every_size
# Marks a test, or a module, for which more ranks take longer and show nothing else.
few_ranks = pytest.mark.mpi(max_size=3)
up_to_four_ranks = pytest.mark.mpi(max_size=4)
# Marks a test of a promise of all methods that no number of ranks changes: three are no power of two, and one of them
# is neither the first nor the last.
three_ranks = pytest.mark.mpi(min_size=3, max_size=3)
# Marks a test, or a module, of steps that each rank does by itself: a third rank does them once more.
up_to_two_ranks = pytest.mark.mpi(max_size=2)
# Marks a slow test of such steps, or one that needs a second rank: other tests show that a lone rank works.
two_ranks = pytest.mark.mpi(min_size=2, max_size=2)


def impatient(mpi_comm: MPI.Intracomm, seconds: float, **options: Any) -> Communicator:
    """Return a communicator that waits `seconds` for other ranks, but longer while all ranks make it.

    On a busy machine ranks come to the same call a while apart.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(missing_ranks, "ANSWER_S", missing_ranks.ANSWER_PART * seconds)
        comm = Communicator(mpi_comm, timeout=TIMEOUT_S, arrival_timeout=TIMEOUT_S, **options)
    comm.timeout = comm.arrival_timeout = seconds
    return comm


def lane_size(metafunc: pytest.Metafunc) -> int:
    """Return the number of ranks, which is 1 without MPI."""
    plugin = metafunc.config.pluginmanager.get_plugin("rank_agreement")
    return 1 if plugin is None else plugin.size


def parametrize_sizes(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for `mpi_comm` on the whole lane, and where sizes matter on 5 and 7 ranks too.

    A module that generates its own tests chooses their ranks itself.
    """
    marked = any(mark.args[0] == "mpi_comm" for mark in metafunc.definition.iter_markers("parametrize"))
    if "mpi_comm" not in metafunc.fixturenames or marked or hasattr(metafunc.module, "pytest_generate_tests"):
        return
    size = lane_size(metafunc)
    parts = PARTS if size >= PARTS_FROM and metafunc.definition.get_closest_marker("every_size") else ()
    metafunc.parametrize("mpi_comm", [size, *parts], indirect=True)


def topologies(size: int) -> list[Topology]:
    """Every topology that fits, with its defaults; tori in all shapes of two rows or columns and more."""
    tori: list[Topology] = [Torus(rows, size // rows) for rows in range(2, size // 2 + 1) if size % rows == 0]
    return [make() for make in TOPOLOGIES.values()] + [torus for torus in tori if torus != Torus()]


def same_everywhere(comm: Communicator, result: NDArray[Any]) -> bool:
    """Return whether all ranks have the same bytes."""
    return len(set(comm.mpi_comm.allgather(hashlib.sha256(result).digest()))) == 1


def mean_of_ranks(comm: Communicator, x: NDArray[Any]) -> NDArray[np.float64]:
    """Return the mean of the ranks' vectors, in double precision."""
    total = np.empty(x.shape)
    comm.mpi_comm.Allreduce(x.astype(np.float64), total)
    return total / comm.size


def same_text_on(comm: Communicator, error: BaseException, ranks: range) -> str:
    """Return the error's text, which must be the same on these ranks."""
    texts = comm.mpi_comm.allgather(str(error))
    assert len({texts[rank] for rank in ranks}) == 1, texts
    return texts[ranks[0]]
