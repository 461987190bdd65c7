"""Promises of ScaleCom, random-k and true top-k: means, sums, bytes, and means that overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, NonFiniteGradient
from mpicomp import RandomK, ScaleCom, TrueTopK
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S, mean_of_ranks
from tests.reference.one_process.shared_indices import OneProcess, Options

N = 3001
STEPS = 10
METHODS: dict[str, Options] = {
    "scalecom": ScaleCom(rate=10),
    "several of a chunk": ScaleCom(rate=10, chunk=70, warmup_steps=2),
    "low-pass": ScaleCom(rate=25, beta=0.3),
    "exact": ScaleCom(rate=50, exact=True),
    "random-k": RandomK(rate=7, seed=5),
    "random-k, low-pass": RandomK(rate=20, beta=0.5, warmup_steps=1),
    "true top-k": TrueTopK(rate=10, chunk=40),
    "true top-k, exact": TrueTopK(rate=30, exact=True, beta=0.7),
}


@pytest.mark.parametrize("kind", ["several of a chunk", "low-pass", "exact", "random-k", "true top-k"])
def test_compressing_the_mean_is_the_mean_of_what_is_compressed(comm: Communicator, kind: str) -> None:
    options = METHODS[kind]
    aggregator: Any = options.start(comm, N)
    for step in range(options.warmup_steps, options.warmup_steps + 5):
        aggregator.step = step
        g = gradient(comm.rank, step, N)
        compensated = g + aggregator.residual
        result = aggregator.aggregate(g)
        places = aggregator.feedback.places
        exact = mean_of_ranks(comm, compensated)
        tolerance = comm.size * 2.0**-23 * mean_of_ranks(comm, np.abs(compensated))
        assert (np.abs(result - exact)[places] <= tolerance[places]).all()
        assert not np.delete(result, places).any()
        assert np.delete(exact, places).any()


@pytest.mark.parametrize("kind", ["scalecom", "low-pass", "random-k, low-pass", "true top-k, exact"])
def test_results_and_pending_rest_add_up_to_the_mean_gradients(comm: Communicator, kind: str) -> None:
    """Sum of results + mean(m) / beta = sum of mean(g), up to rounding."""
    options = METHODS[kind]
    aggregator: Any = options.start(comm, N)
    results, given, largest = np.zeros(N), np.zeros(N), 0.0
    for step in range(STEPS):
        g = gradient(comm.rank, step, N)
        result = aggregator.aggregate(g)
        rest = mean_of_ranks(comm, aggregator.residual) / options.beta
        results += result
        given += mean_of_ranks(comm, g)
        largest = max(largest, float((np.abs(rest) + np.abs(result)).max()))
        np.testing.assert_allclose(results + rest, given, rtol=0, atol=(step + 1) * 2**-22 * 2 * largest)
    assert rest.any()


@pytest.mark.parametrize("options", [ScaleCom(rate=10), ScaleCom(rate=20, chunk=400), RandomK(rate=10)], ids=str)
@pytest.mark.parametrize("comm", ["auto", "ring"], indirect=True)
def test_bytes_per_rank_do_not_grow_with_the_ranks(comm: Communicator, options: Options) -> None:
    n, size, steps = 400_000, comm.size, 3
    aggregator: Any = options.start(comm, n)
    for step in range(steps):
        aggregator.aggregate(gradient(0, step, n))
    sent = aggregator.traffic.total.bytes_sent / steps
    k = n // options.rate
    bits = 0 if isinstance(options, RandomK) else ((options.chunk or options.rate) - 1).bit_length()
    values, indices = 2 * (size - 1) / size * 4 * k, bits * k / 8
    everyones = comm.mpi_comm.allreduce(sent)
    assert everyones == pytest.approx(size * values + (size - 1) * indices, rel=0.02)
    assert sent <= (values + indices) * 1.05


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_mean_that_overflows_is_told_and_nothing_has_changed(comm: Communicator, warmup_steps: int, way: str) -> None:
    aggregator: Any = ScaleCom(rate=10, warmup_steps=warmup_steps).start(comm, N)
    g = gradient(comm.rank, 0, N).copy()
    g[55] = 3e38
    if comm.size == 1:
        assert aggregator.aggregate(g)[55] == np.float32(3e38)
        return
    with pytest.raises(NonFiniteGradient, match=r"no rank \(the sum overflowed\)"):
        aggregator.aggregate(g)
    assert not aggregator.residual.any()
    assert aggregator.step == 0


@pytest.mark.mpi(min_size=2)
def test_large_numbers_whose_mean_is_none_of_them_are_no_error(mpi_comm: MPI.Intracomm, way: str) -> None:
    with Communicator(mpi_comm, "star", TIMEOUT_S) as comm:
        options = ScaleCom(rate=10)
        aggregator: Any = options.start(comm, N)
        rows = np.array([gradient(rank, 0, N) for rank in range(comm.size)])
        rows[0, 55], rows[1, 55] = 3e38, -3e38
        expected = OneProcess(options, comm.topology, comm.size, N)
        assert (aggregator.aggregate(rows[comm.rank]) == expected.step(rows)).all()
        assert (aggregator.residual == expected.residuals[comm.rank]).all()
