"""Marsit over every topology equals its one-process simulation to the bit, however it is cut, whenever it arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, DoubleTree, Ring, Torus
from collectives.schedules.plan import Topology
from mpicomp import Marsit
from mpicomp.reducers import sign_merge as onebit
from tests.mpi.lanes import TIMEOUT_S, same_everywhere, topologies
from tests.reference.one_process.marsit import OneProcess

EVERY_SIZE = True
N = 9 * 4096 + 11
STEPS = 4
ONE_BLOCK = 512  # bytes of the shortest piece

OPTIONS = {
    "own": Marsit(full_precision_every=3),
    "own, gamma follows": Marsit(full_precision_every=None, gamma="auto", clip=0.5, seed=7),
    "paper": Marsit(full_precision_every=3, residual="paper", seed=-1),
    "paper, never dense": Marsit(full_precision_every=None, residual="paper", global_step=0.3),
    "stateless": Marsit(full_precision_every=None, global_step=0.5, compensation=False),
}


@cache
def updates(size: int, step: int, n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    """One row a rank: some signal, much noise, and zeros."""
    rng = np.random.default_rng([size, step])
    rows = (rng.standard_normal((size, n)) + rng.standard_normal(n) / 2).astype(dtype)
    rows[:, ::97] = 0
    rows.flags.writeable = False
    return rows


@dataclass
class Run:
    """One rank's part of a run; `check` compares all ranks' with one process, on rank 0, once all have run."""

    mpi_comm: MPI.Intracomm
    topology: Topology | None
    options: Marsit
    n: int = N
    dtype: Any = np.float32
    tensor_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.results: list[NDArray[Any]] = []
        self.residuals: list[list[NDArray[Any]] | None] = []
        with Communicator(self.mpi_comm, self.topology or "auto", TIMEOUT_S, piece_bytes=ONE_BLOCK) as comm:
            aggregator = self.options.start(comm, self.n, dtype=self.dtype, tensor_lengths=self.tensor_lengths or None)
            for step in range(STEPS):
                self.results.append(aggregator.aggregate(updates(comm.size, step, self.n, self.dtype)[comm.rank]))
                self.residuals.append(self.mpi_comm.gather(aggregator.state_dict().get("residual", np.zeros(self.n))))
            assert same_everywhere(comm, np.array(self.results))

    def check(self) -> None:
        if self.mpi_comm.rank:
            return
        expected = OneProcess(self.options, self.topology, self.mpi_comm.size, self.n, self.dtype, self.tensor_lengths)
        for step, (result, residuals) in enumerate(zip(self.results, self.residuals, strict=True)):
            where = (self.topology, self.options, step)
            assert result.dtype == self.dtype, where
            assert (result == expected.step(updates(self.mpi_comm.size, step, self.n, self.dtype))).all(), where
            for rank, residual in enumerate(residuals or ()):
                assert (residual == expected.residuals[rank]).all(), (*where, rank)


@pytest.mark.parametrize("kind", ["own", "paper"])
def test_results_and_residuals_are_those_of_one_process(mpi_comm: MPI.Intracomm, kind: str) -> None:
    tried = topologies(mpi_comm.size) if kind == "own" else [Ring(), DoubleTree()]
    for run in [Run(mpi_comm, topology, OPTIONS[kind]) for topology in tried]:
        run.check()


@pytest.mark.parametrize("kind", ["own, gamma follows", "paper, never dense", "stateless"])
def test_all_options_are_those_of_one_process(mpi_comm: MPI.Intracomm, kind: str) -> None:
    Run(mpi_comm, Torus(), OPTIONS[kind]).check()


@pytest.mark.parametrize("kind", ["own, gamma follows", "paper, never dense", "stateless"])
@pytest.mark.parametrize("n", [1, 5003])
def test_small_vectors_take_the_short_way_to_the_same_end(mpi_comm: MPI.Intracomm, kind: str, n: int) -> None:
    Run(mpi_comm, None, OPTIONS[kind], n).check()


@pytest.mark.parametrize(("kind", "dtype"), [("own", np.float16), ("paper", np.float16), ("own", np.float64)])
def test_other_floats_keep_residuals_of_their_results(mpi_comm: MPI.Intracomm, kind: str, dtype: Any) -> None:
    Run(mpi_comm, Ring(), OPTIONS[kind], dtype=dtype).check()


@pytest.mark.parametrize("kind", ["own", "paper"])
def test_segments_have_steps_of_their_own(mpi_comm: MPI.Intracomm, kind: str) -> None:
    Run(mpi_comm, Ring(), OPTIONS[kind], tensor_lengths=(64, 4096 + 128, N - 64 - 4096 - 128)).check()


def results(mpi_comm: MPI.Intracomm, topology: Topology, kind: str, piece_bytes: int | None) -> list[bytes]:
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes) as comm:
        aggregator = OPTIONS[kind].start(comm, N)
        found = [aggregator.aggregate(updates(comm.size, step)[comm.rank]).tobytes() for step in range(3)]
        return [*found, aggregator.state_dict()["residual"].tobytes()]


@pytest.mark.parametrize("kind", ["own", "paper"])
def test_neither_pieces_nor_slots_nor_arrival_order_change_a_bit(
    mpi_comm: MPI.Intracomm, kind: str, jitter: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = topologies(mpi_comm.size) if kind == "own" else [Ring(), DoubleTree()]
    expected = {topology: results(mpi_comm, topology, kind, None) for topology in tried}
    monkeypatch.setattr(onebit, "MOST_SLOTS", 1)
    jitter(mpi_comm.rank)
    for topology, first in expected.items():
        assert results(mpi_comm, topology, kind, ONE_BLOCK) == first, topology
