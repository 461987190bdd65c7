"""Long runs of Marsit: replicas stay together, and a run goes on from its state."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpicomp import Marsit
from tests.mpi.lanes import TIMEOUT_S, same_everywhere

N = 5003
OPTIONS = {
    "own": Marsit(full_precision_every=3, gamma="auto"),
    "paper": Marsit(full_precision_every=3, residual="paper"),
}


def update(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(N, np.float32)


@pytest.mark.parametrize("topology", ["auto", "ring"])
def test_replicas_are_the_same_to_the_bit_after_200_steps(mpi_comm: MPI.Intracomm, topology: str) -> None:
    n = 9000
    with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
        aggregator = Marsit(full_precision_every=50).start(comm, n)
        rng = np.random.default_rng(comm.rank)
        target, model = np.linspace(-1, 1, n, dtype=np.float32), np.zeros(n, np.float32)
        for _ in range(200):
            noise = rng.standard_normal(n, np.float32) / 4
            model -= aggregator.aggregate(np.float32(0.02) * (model - target + noise))
        assert same_everywhere(comm, model)
        assert np.abs(model - target).mean() < 0.2, "and it has learnt what it was shown"


@pytest.mark.parametrize("kind", ["own", "paper"])
@pytest.mark.parametrize("taken", [1, 3, 4])
def test_a_run_goes_on_to_the_bit_from_its_state(mpi_comm: MPI.Intracomm, kind: str, taken: int) -> None:
    for topology in ("ring", "auto"):
        with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
            aggregator, state = OPTIONS[kind].start(comm, N), {}
            straight = []
            for step in range(7):
                if step == taken:
                    state = aggregator.state_dict()
                straight.append(aggregator.aggregate(update(comm.rank, step)))
            # one that has a past of its own, at other steps and with another residual
            resumed = OPTIONS[kind].start(comm, N)
            resumed.aggregate(update(comm.rank, 99))
            resumed.aggregate(update(comm.rank, 98))
            resumed.load_state_dict(state)
            for step in range(taken, 7):
                again = resumed.aggregate(update(comm.rank, step))
                assert (again == straight[step]).all(), (topology, step)
            after, expected = resumed.state_dict(), aggregator.state_dict()
            assert (after["residual"] == expected["residual"]).all()
            assert after["gamma"] == expected["gamma"]
