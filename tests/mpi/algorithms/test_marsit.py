"""Conserved quantities and traffic of Marsit, and replicas that stay together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpicomp import Marsit
from tests.exact import gradient
from tests.mpi.lanes import few_ranks, mean_of_ranks, same_everywhere
from tests.reference.statistics import ERROR

N = 5003
STEPS = 13


@pytest.mark.parametrize("comm", ["auto", "ring"], indirect=True)
@pytest.mark.parametrize("every", [1, 3, None])
def test_paper_results_and_mean_residual_add_up_to_the_mean_updates(comm: Communicator, every: int | None) -> None:
    aggregator = Marsit(full_precision_every=every, residual="paper").start(comm, N)
    results, updates, largest = np.zeros(N), np.zeros(N), 0.0
    for step in range(STEPS):
        u = gradient(comm.rank, step, N)
        g = aggregator.aggregate(u)
        c = aggregator.state_dict()["residual"]
        results += g
        updates += mean_of_ranks(comm, u)
        largest = max(largest, comm.mpi_comm.allreduce(float((np.abs(c) + np.abs(g)).max()), MPI.MAX))
        np.testing.assert_allclose(results + mean_of_ranks(comm, c), updates, rtol=0, atol=STEPS * 2**-23 * largest)
    if every == 1:
        assert not c.any()


@pytest.mark.parametrize("comm", ["auto", "ring"], indirect=True)
@pytest.mark.parametrize("clip", [0.25, math.inf])
def test_own_votes_residual_and_what_was_clipped_add_up_to_the_updates(comm: Communicator, clip: float) -> None:
    aggregator = Marsit(full_precision_every=None, clip=clip).start(comm, N)
    c, lost, cut = np.zeros(N, np.float32), np.zeros(N), 0
    votes, updates, strayed, variance = np.zeros(N), np.zeros(N), np.zeros(N), np.zeros(N)
    for step in range(STEPS):
        u = gradient(comm.rank, step, N)
        g = aggregator.aggregate(u)
        s, q = np.abs(g[0]), np.where(u + c >= 0, 1, -1).astype(np.float32)
        unclipped = u + c - s * q
        c = aggregator.state_dict()["residual"]
        assert np.abs(c).max() <= clip * s
        inside = np.abs(c) < clip * s
        assert (c == unclipped)[inside].all()
        assert (c == np.copysign(clip * s, unclipped))[~inside].all()
        lost += unclipped.astype(np.float64) - c
        cut += int((unclipped != c).sum())
        votes += s * q
        updates += u
        np.testing.assert_allclose(c + votes + lost, updates, rtol=0, atol=STEPS * 2**-20 * float(s))
        share = mean_of_ranks(comm, q)
        strayed += g - s * share
        variance += float(s) ** 2 * (1 - share**2)  # 4 p (1 - p) with p = (1 + share) / 2
    assert (cut > 0) == (clip < math.inf)
    # The result is the votes' mean and a martingale of known variance.
    spread = strayed**2
    t = -math.log(ERROR)
    assert abs(spread.sum() - variance.sum()) <= math.sqrt(2 * t * (3 * variance**2).sum()) + 1e-6


@pytest.mark.mpi(min_size=2, max_size=4)
@pytest.mark.parametrize(("every", "steps"), [(None, 2), (3, 4), (5, 5)])
@pytest.mark.parametrize("comm", ["ring", "torus"], indirect=True)
def test_bits_per_element_are_what_the_method_promises(comm: Communicator, every: int | None, steps: int) -> None:
    n, size = 1_000_003, comm.size
    aggregator = Marsit(full_precision_every=every, global_step=0.1).start(comm, n)
    u, out = gradient(comm.rank, 0, n), np.empty(n, np.float32)
    for _ in range(steps):
        aggregator.aggregate(u, out)
    dense_rounds = 0 if every is None else math.ceil(steps / every)
    sent = comm.mpi_comm.allreduce(8 * aggregator.traffic.total.bytes_sent) / size
    per_phase = sent / (2 * n * (size - 1) / size) / steps
    assert per_phase == pytest.approx((steps + 31 * dense_rounds) / steps, rel=0.01)
    assert aggregator.traffic.total.calls == steps


@pytest.mark.parametrize("comm", ["auto", pytest.param("ring", marks=few_ranks)], indirect=True)
def test_replicas_are_the_same_to_the_bit_after_200_steps(comm: Communicator) -> None:
    n = 9000
    aggregator = Marsit(full_precision_every=50).start(comm, n)
    rng = np.random.default_rng(comm.rank)
    target, model = np.linspace(-1, 1, n, dtype=np.float32), np.zeros(n, np.float32)
    for _ in range(200):
        noise = rng.standard_normal(n, np.float32) / 4
        model -= aggregator.aggregate(np.float32(0.02) * (model - target + noise))
    assert same_everywhere(comm, model)
    assert np.abs(model - target).mean() < 0.2, "and it has learnt what it was shown"
