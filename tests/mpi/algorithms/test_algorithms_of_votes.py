"""Promises and bytes of the methods that travel as counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, DoubleTree, HalvingDoubling, Ring, Torus
from collectives.execution.program import partition
from collectives.schedules.plan import Topology
from mpicomp.algorithms.ef_signsgd import EFSignSGD
from mpicomp.contrib.majority_vote import MajorityVote
from mpicomp.contrib.ssdm import SSDM
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S, few_ranks, topologies
from tests.reference.statistics import assert_binomial

N = 5 * 4096 + 75

# Promises of the methods ---------------------------------------------------------------------------------------------


def test_ties_fall_evenly_and_majorities_win(mpi_comm: MPI.Intracomm) -> None:
    n = 100_000
    with Communicator(mpi_comm, HalvingDoubling(), TIMEOUT_S) as comm:
        aggregator = MajorityVote().start(comm, n)
        split = np.full(n, 1 if comm.rank < comm.size / 2 else -1, np.float32)
        result = aggregator.aggregate(split)
        if comm.size % 2:
            assert (result == 1).all()
        else:
            assert_binomial((result > 0).sum(), n, 0.5, "positive ties")


def test_results_and_residuals_of_ef_signsgd_keep_the_gradients_mean(mpi_comm: MPI.Intracomm) -> None:
    """Sum of results + mean residual = sum of mean gradients; one common scale takes away M D s^2."""
    with Communicator(mpi_comm, Torus(), TIMEOUT_S) as comm:
        aggregator = EFSignSGD().start(comm, N)
        given, taken = np.zeros(N), np.zeros(N)
        for step in range(6):
            g = gradient(comm.rank, step, N)
            p = g.astype(np.float64) + aggregator.state_dict()["residual"]
            taken += aggregator.aggregate(g)
            given += mpi_comm.allreduce(g.astype(np.float64)) / comm.size
            residual = aggregator.state_dict()["residual"].astype(np.float64)
            energies = mpi_comm.allreduce(np.array([(residual**2).sum(), (p**2).sum()]))
            scale = float(aggregator.feedback.scales[0])
            assert energies[0] == pytest.approx(energies[1] - comm.size * N * scale**2, rel=1e-4)
        pending = mpi_comm.allreduce(residual) / comm.size
    np.testing.assert_allclose(taken + pending, given, atol=1e-4)


@few_ranks
@pytest.mark.parametrize("bucket", [None, 1000])
def test_with_ef_signsgd_a_coordinate_that_is_always_zero_swings_by_one_scale_at_most(
    mpi_comm: MPI.Intracomm, bucket: int | None
) -> None:
    n = 5000
    with Communicator(mpi_comm, Ring(), TIMEOUT_S) as comm:
        aggregator = EFSignSGD(bucket).start(comm, n)
        moved, scales, farthest = np.zeros(n), np.zeros(n), 0.0
        for step in range(20):
            moved += aggregator.aggregate(gradient(comm.rank, step, n))
            scales = np.maximum(scales, np.repeat(aggregator.feedback.scales, bucket or n)[:n])  # the largest so far
            assert (np.abs(moved) <= 1.0001 * scales)[::97].all(), step
            farthest = max(farthest, np.abs(moved[::97]).max())
        assert farthest > 0


@pytest.mark.communicator(topology="auto")
def test_ssdm_is_unbiased_and_ranks_draw_for_themselves(comm: Communicator) -> None:
    values, repeats, steps = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3], np.float32), 50, 20
    x = np.tile(values, repeats)
    norm = float(np.float32(np.linalg.norm(x.astype(np.float64))))
    aggregator = SSDM(scale="norm").start(comm, x.size)
    ups = np.zeros(values.size, int)
    for _ in range(steps):
        counts = np.rint((aggregator.aggregate(x) * comm.size / norm + comm.size) / 2).astype(int)
        ups += counts.reshape(repeats, -1).sum(axis=0)
    for i, value in enumerate(values):
        assert_binomial(ups[i], steps * repeats * comm.size, 0.5 + float(value) / (2 * norm), f"value {i}")
    if comm.size > 1:
        # ranks with equal draws would always agree on elements that are 0
        one = np.zeros(10_001, np.float32)
        one[0] = 1
        agreed = np.abs(SSDM().start(comm, one.size).aggregate(one)[1:]) > 0.999
        assert_binomial(agreed.sum(), agreed.size, 2.0 ** (1 - comm.size), "unanimous elements")


@pytest.mark.communicator(topology="auto")
def test_ssdm_errs_by_as_much_as_its_variance_says(comm: Communicator) -> None:
    """About D N^2 / M: each rank adds N^2 - x^2 to an element's, over M^2."""
    n, steps = 2000, 10
    rows = np.array([gradient(rank, 0, n) for rank in range(comm.size)], np.float64)
    squares = (rows**2).sum(axis=1)
    longest, expected = squares.max(), (n * squares.max() - squares).sum() / comm.size**2
    assert expected == pytest.approx(n * longest / comm.size, rel=0.01)
    aggregator = SSDM(scale="norm").start(comm, n)
    results = [aggregator.aggregate(gradient(comm.rank, 0, n)) for _ in range(steps)]
    error = sum(float(((result - rows.mean(axis=0)) ** 2).sum()) for result in results) / steps
    # of n steps errors, each squared, which differ by sqrt(2) times their mean at most
    assert error == pytest.approx(expected, rel=6 * np.sqrt(2 / (n * steps)))


# Bytes on the wire ---------------------------------------------------------------------------------------------------


def sent(mpi_comm: MPI.Intracomm, options: Any, topology: Topology, n: int, extra: int) -> int:
    """Return the bytes of a step, less `extra` bytes for each other rank; no call is compared."""
    with Communicator(mpi_comm, topology, TIMEOUT_S, verify=False) as comm:
        aggregator = options.start(comm, n)
        aggregator.aggregate(gradient(comm.rank, 0, n))
        return aggregator.traffic.last.bytes_sent - extra * (comm.size - 1)


def test_a_ring_sends_growing_counts_and_then_whole_ones_or_single_bits(mpi_comm: MPI.Intracomm) -> None:
    size = mpi_comm.size
    n, bits = size * 4096, [max(1, int(np.ceil(np.log2(m + 1)))) for m in range(size + 1)]
    growing = sum(512 * bits[m] for m in range(1, size))
    assert sent(mpi_comm, EFSignSGD(), Ring(), n, 8) == growing + (size - 1) * 512 * bits[size]
    assert sent(mpi_comm, SSDM(), Ring(), n, 8) == growing + (size - 1) * 512 * bits[size]
    assert sent(mpi_comm, MajorityVote(), Ring(), n, 8) == growing + (size - 1) * 512


def test_other_topologies_send_what_their_plans_say(mpi_comm: MPI.Intracomm) -> None:
    for options in (MajorityVote(), EFSignSGD()):
        wire = options.message_model(N, "float32", mpi_comm.size, 1 << 20)
        for topology in topologies(mpi_comm.size):
            plan = topology.plan(mpi_comm.rank, mpi_comm.size)
            lengths = [len(chunk) for chunk in partition(N, plan.n_chunks, wire.alignment)]
            sends = [send for step in plan.steps for send in step.sends]
            expected = sum(wire.nbytes(lengths[chunk], send.weight) for send in sends for chunk in send.chunks)
            assert sent(mpi_comm, options, topology, N, 8) == expected, topology


def test_scales_of_buckets_are_eight_bytes_each_and_the_counts_are_the_same(mpi_comm: MPI.Intracomm) -> None:
    for bucket in (64, 1000, 9000):
        buckets = -(-N // bucket)
        assert sent(mpi_comm, EFSignSGD(bucket), Ring(), N, 8 * buckets) == sent(mpi_comm, EFSignSGD(), Ring(), N, 8)


@pytest.mark.mpi(min_size=8)
def test_elias_messages_are_shorter_than_those_of_whole_bits(mpi_comm: MPI.Intracomm) -> None:
    n = 9 * 4096 + 75
    for topology in (Ring(), HalvingDoubling(), DoubleTree()):
        elias, fixed = (sent(mpi_comm, SSDM(coding=coding), topology, n, 8) for coding in ("elias", "fixed"))
        assert mpi_comm.allreduce(elias) < 0.9 * mpi_comm.allreduce(fixed), topology
