"""ScaleCom, random-k and true top-k equal their one-process simulation to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, DoubleTree, HalvingDoubling, Ring
from collectives.schedules.plan import Topology
from mpicomp import ScaleCom
from tests.mpi.lanes import TIMEOUT_S, same_everywhere, topologies
from tests.mpi.reducers.shared_indices_runs import METHODS, STEPS, N, gradients, way
from tests.reference.one_process.shared_indices import OneProcess, Options

__all__ = ["way"]

EVERY_SIZE = True


def check(
    mpi_comm: MPI.Intracomm,
    topology: Topology,
    options: Options,
    steps: int = STEPS,
    n: int = N,
    dtype: Any = np.float32,
    tensor_lengths: tuple[int, ...] = (),
) -> None:
    """Compare a run with that of one process, which rank 0 makes."""
    runs = []
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=512) as comm:
        aggregator: Any = options.start(comm, n, dtype=dtype, tensor_lengths=tensor_lengths or None)
        for step in range(steps):
            result = aggregator.aggregate(gradients(comm.size, step, n, dtype)[comm.rank])
            residuals = np.empty((comm.size, n), aggregator.residual.dtype) if comm.rank == 0 else None
            mpi_comm.Gather(aggregator.residual, residuals)
            runs.append((result, residuals, aggregator.places.copy()))
        assert same_everywhere(comm, np.array([result for result, _, _ in runs]))
    if mpi_comm.rank:
        return
    expected = OneProcess(options, topology, mpi_comm.size, n, dtype, tensor_lengths)
    for step, (result, residuals, places) in enumerate(runs):
        where = f"{topology}, {options}, step {step}"
        np.testing.assert_array_equal(result, expected.step(gradients(mpi_comm.size, step, n, dtype)), where)
        assert result.dtype == dtype, where
        np.testing.assert_array_equal(residuals, expected.residuals, where)
        if step >= options.warmup_steps:
            np.testing.assert_array_equal(places, expected.places, where)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("in parts", "scalecom"),
        ("in parts", "several of a chunk"),
        ("brief", "several of a chunk"),
        ("in parts", "low-pass"),
        ("brief", "exact"),
        ("brief", "random-k"),
        ("in parts", "random-k, low-pass"),
        ("in parts", "true top-k"),
        ("brief", "true top-k, exact"),
    ],
    indirect=["way"],
)
def test_results_and_residuals_are_those_of_one_process(mpi_comm: MPI.Intracomm, kind: str, way: str) -> None:
    check(mpi_comm, Ring() if way == "brief" else DoubleTree(), METHODS[kind])


@pytest.mark.parametrize("n", [0, 1, 3, 99])
def test_vectors_may_be_short(mpi_comm: MPI.Intracomm, n: int, way: str) -> None:
    for kind in ("several of a chunk", "exact", "random-k"):
        check(mpi_comm, Ring(), METHODS[kind], steps=3, n=n)


@pytest.mark.parametrize("way", ["in parts"], indirect=True)
def test_every_topology_gives_its_own_sums(mpi_comm: MPI.Intracomm, way: str) -> None:
    for topology in topologies(mpi_comm.size):
        check(mpi_comm, topology, METHODS["several of a chunk"], steps=4)


@pytest.mark.parametrize("way", ["in parts"], indirect=True)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("kind", ["several of a chunk", "low-pass", "true top-k"])
def test_other_floats_keep_float32_residuals_or_better(
    mpi_comm: MPI.Intracomm, kind: str, dtype: Any, way: str
) -> None:
    check(mpi_comm, HalvingDoubling(), METHODS[kind], steps=5, dtype=dtype)


@pytest.mark.parametrize("options", [ScaleCom(rates=(25, 1, 400)), ScaleCom(rates=(25, 50, 5), chunk=200)], ids=str)
def test_segments_have_rates_of_their_own(mpi_comm: MPI.Intracomm, options: ScaleCom, way: str) -> None:
    check(mpi_comm, Ring(), options, steps=3, tensor_lengths=(1024, 64, N - 1024 - 64))
