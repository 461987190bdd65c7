"""What ScaleCom, random-k and true top-k promise: means, sums, bytes; and what they do with NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient
from mpicomp import RandomK, ScaleCom
from tests.mpi.lanes import TIMEOUT_S, same_everywhere
from tests.mpi.reducers.shared_indices_runs import METHODS, STEPS, N, every_method, gradients, way
from tests.reference.one_process.shared_indices import OneProcess, Options

__all__ = ["way"]

in_parts = pytest.mark.parametrize("way", ["in parts"], indirect=True)


def test_topology_auto_gives_every_rank_the_same(mpi_comm: MPI.Intracomm, way: str) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        for options in METHODS.values():
            aggregator: Any = options.start(comm, N)
            results = [aggregator.aggregate(gradients(comm.size, step)[comm.rank]) for step in range(5)]
            assert same_everywhere(comm, np.array(results))
            assert same_everywhere(comm, aggregator.places)


def test_when_messages_arrive_changes_no_bit(mpi_comm: MPI.Intracomm, jitter: Callable[[int], None], way: str) -> None:
    def run() -> list[bytes]:
        with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
            aggregator: Any = METHODS["several of a chunk"].start(comm, N)
            results = [aggregator.aggregate(gradients(comm.size, step)[comm.rank]) for step in range(6)]
            return [*(result.tobytes() for result in results), aggregator.residual.tobytes()]

    first = run()
    jitter(mpi_comm.rank)
    assert run() == first


def gathered(comm: Communicator, x: NDArray[Any]) -> NDArray[np.float64]:
    """The ranks' vectors in double precision, one a row."""
    rows = np.empty((comm.size, x.size))
    comm.mpi_comm.Allgather(x.astype(np.float64), rows)
    return rows


@pytest.mark.parametrize("kind", ["several of a chunk", "low-pass", "exact", "random-k", "true top-k"])
def test_compressing_the_mean_is_the_mean_of_what_is_compressed(mpi_comm: MPI.Intracomm, kind: str) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        options = METHODS[kind]
        aggregator: Any = options.start(comm, N)
        for step in range(options.warmup_steps, options.warmup_steps + 5):
            aggregator.step = step
            g = gradients(comm.size, step)[comm.rank]
            compensated = gathered(comm, g + aggregator.residual)
            result = aggregator.aggregate(g)
            places = aggregator.places
            exact = compensated.mean(axis=0)
            tolerance = comm.size * 2.0**-23 * np.abs(compensated).mean(axis=0)
            assert (np.abs(result - exact)[places] <= tolerance[places]).all()
            assert not np.delete(result, places).any()
            assert np.delete(exact, places).any()


@pytest.mark.parametrize("kind", ["scalecom", "low-pass", "random-k, low-pass", "true top-k, exact"])
def test_results_and_pending_rest_add_up_to_the_mean_gradients(mpi_comm: MPI.Intracomm, kind: str) -> None:
    """Sum of results + mean(m) / beta = sum of mean(g), up to rounding."""
    options = METHODS[kind]
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator: Any = options.start(comm, N)
        results, given, largest = np.zeros(N), np.zeros(N), 0.0
        for step in range(STEPS):
            g = gradients(comm.size, step)[comm.rank]
            result = aggregator.aggregate(g)
            rest = gathered(comm, aggregator.residual).mean(axis=0) / options.beta
            results += result
            given += gathered(comm, g).mean(axis=0)
            largest = max(largest, float((np.abs(rest) + np.abs(result)).max()))
            np.testing.assert_allclose(results + rest, given, rtol=0, atol=(step + 1) * 2**-22 * 2 * largest)
        assert rest.any()


@pytest.mark.parametrize("options", [ScaleCom(rate=10), ScaleCom(rate=20, chunk=400), RandomK(rate=10)], ids=str)
@pytest.mark.parametrize("topology", ["auto", "ring"])
def test_bytes_per_rank_do_not_grow_with_the_ranks(mpi_comm: MPI.Intracomm, topology: str, options: Options) -> None:
    n, size, steps = 400_000, mpi_comm.size, 3
    with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
        aggregator: Any = options.start(comm, n)
        for step in range(steps):
            aggregator.aggregate(gradients(1, step, n)[0])
        sent = aggregator.traffic.total.bytes_sent / steps
    k = n // options.rate
    bits = 0 if isinstance(options, RandomK) else ((options.chunk or options.rate) - 1).bit_length()
    values, indices = 2 * (size - 1) / size * 4 * k, bits * k / 8
    everyones = mpi_comm.allreduce(sent)
    assert everyones == pytest.approx(size * values + (size - 1) * indices, rel=0.02)
    assert sent <= (values + indices) * 1.05


@pytest.mark.parametrize("kind", ["several of a chunk", "low-pass", "random-k", "true top-k"])
def test_a_run_goes_on_from_a_state_to_the_bit(mpi_comm: MPI.Intracomm, kind: str) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        going_on: Any = METHODS[kind].start(comm, N)
        for step in range(5):
            going_on.aggregate(gradients(comm.size, step)[comm.rank])
        state = going_on.state_dict()
        resumed: Any = METHODS[kind].start(comm, N)
        resumed.load_state_dict(state)
        for step in range(5, 5 + comm.size):
            g = gradients(comm.size, step)[comm.rank]
            assert (resumed.aggregate(g) == going_on.aggregate(g)).all()
            assert (resumed.residual == going_on.residual).all()
        assert (state["residual"] != going_on.residual).any()


# What is no number ---------------------------------------------------------------------------------------------------


def check_bad_numbers(comm: Communicator, options: Options) -> None:
    """After a few steps, let the leader and another rank have NaN or infinity; then go on."""
    aggregator, twin = options.start(comm, N), options.start(comm, N)
    step = 3
    for earlier in range(step):
        g = gradients(comm.size, earlier)[comm.rank]
        aggregator.aggregate(g)
        twin.aggregate(g)
    before = aggregator.state_dict()
    g = gradients(comm.size, step)[comm.rank]
    leader = step % comm.size
    for bad, place, culprit in ((math.nan, 0, leader), (math.inf, 1234, leader + 1), (-math.inf, N - 1, leader)):
        culprit %= comm.size
        spoiled = g.copy()
        if comm.rank == culprit:
            spoiled[place] = bad
        where = f"vector 0, step {step}, from rank {culprit};"
        with pytest.raises(NonFiniteGradient, match=f"NaN or infinity in {where}") as caught:
            aggregator.aggregate(spoiled)
        assert caught.value.ranks == (culprit,)
        after = aggregator.state_dict()
        assert after["step"] == before["step"]
        assert (after["residual"] == before["residual"]).all()
    assert (aggregator.aggregate(g) == twin.aggregate(g)).all()
    assert (aggregator.state_dict()["residual"] == twin.state_dict()["residual"]).all()


@every_method
@in_parts
def test_a_number_that_is_none_is_told_everywhere_and_nothing_has_changed(
    mpi_comm: MPI.Intracomm, kind: str, way: str
) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        check_bad_numbers(comm, METHODS[kind])


@pytest.mark.parametrize("kind", ["several of a chunk", "random-k"])
def test_it_is_told_of_short_vectors_too(mpi_comm: MPI.Intracomm, kind: str) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        check_bad_numbers(comm, METHODS[kind])


def test_it_is_told_while_warming_up(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        check_bad_numbers(comm, ScaleCom(rate=10, warmup_steps=4))


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_mean_that_overflows_is_told_and_nothing_has_changed(
    mpi_comm: MPI.Intracomm, warmup_steps: int, way: str
) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator: Any = ScaleCom(rate=10, warmup_steps=warmup_steps).start(comm, N)
        g = gradients(comm.size, 0)[comm.rank].copy()
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
        rows = gradients(comm.size, 0).copy()
        rows[0, 55], rows[1, 55] = 3e38, -3e38
        expected = OneProcess(options, comm.topology, comm.size, N)  # type: ignore[arg-type]
        assert (aggregator.aggregate(rows[comm.rank]) == expected.step(rows)).all()
        assert (aggregator.residual == expected.residuals[comm.rank]).all()


def test_a_mean_beyond_float16_is_told_and_nothing_has_changed(mpi_comm: MPI.Intracomm, way: str) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator: Any = ScaleCom(rate=10).start(comm, 10, dtype=np.float16)
        g = np.zeros(10, np.float16)
        g[0], g[1] = 60000, 50000
        assert aggregator.aggregate(g)[0] == np.float16(60000)
        before = aggregator.state_dict()
        with pytest.raises(NonFiniteGradient, match="vector 0, step 1"):
            aggregator.aggregate(g)
        after = aggregator.state_dict()
        assert after["step"] == 1
        assert (after["residual"] == before["residual"]).all()


def test_warm_up_is_dense_and_leaves_nothing(mpi_comm: MPI.Intracomm, way: str) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator: Any = ScaleCom(rate=100, warmup_steps=3).start(comm, N)
        for step in range(5):
            rows = gradients(comm.size, step)
            result = aggregator.aggregate(rows[comm.rank])
            if step < 3:
                np.testing.assert_allclose(result, rows.astype(np.float64).mean(axis=0), rtol=0, atol=1e-5)
            else:
                assert np.count_nonzero(result) <= -(-N // 100)
            assert aggregator.residual.any() == (step >= 3)
