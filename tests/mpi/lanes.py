"""Numbers of ranks and topologies that a test runs on, and agreement of the ranks."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
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
# Marks a test, or a module, that also runs in the lane of one rank, because a lone rank takes another way.
alone_too = pytest.mark.alone_too
# Marks a test of plans that also runs in the lane of eight ranks.
eight_too = pytest.mark.eight_too
# Marks such a test that 1, 4, 5 and 7 ranks run as threads, too, in tests/unit/collectives/threads.
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


def delay_messages(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Let this rank sleep now and then from now on, so that messages arrive in another order."""
    from collectives.consistency.recursive_doubling import RecursiveDoubling
    from collectives.execution.pipelined import PipelinedExecution
    from collectives.execution.stepwise import StepwiseExecution

    chance = random.Random(seed)

    def delayed(method: Callable[..., Any], part: float) -> Callable[..., Any]:
        def late(*args: Any) -> Any:
            if chance.random() < part:
                time.sleep(chance.random() * 1e-3)
            return method(*args)

        return late

    patch.setattr(PipelinedExecution, "_turn", delayed(PipelinedExecution._turn, 0.05))
    patch.setattr(StepwiseExecution, "_round", delayed(StepwiseExecution._round, 0.5))
    patch.setattr(RecursiveDoubling, "_take", delayed(RecursiveDoubling._take, 0.5))


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
