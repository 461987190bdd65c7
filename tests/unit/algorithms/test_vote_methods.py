"""Methods by counts on one rank: long vectors, buckets, zeros, unbiased draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import Communicator, redistribute, run_local
from mpicomp.algorithms.ef_signsgd import EFSignSGD
from mpicomp.algorithms.majority_vote import MajorityVote
from mpicomp.algorithms.ssdm import SSDM
from tests.exact import Trial
from tests.reference.statistics import assert_binomial

N, STEPS = 2 * 4096 + 77, 6


def gradients(steps: int = STEPS, n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    """One row a step; some zeros."""
    rows = np.random.default_rng(n).standard_normal((steps, n))
    rows[:, ::31] = 0
    return rows.astype(dtype)


def test_a_bucket_longer_than_the_vector_is_the_whole_of_it(comm: Communicator) -> None:
    g, (whole, longer) = gradients()[0], (EFSignSGD(bucket).start(comm, N) for bucket in (None, 10 * N))
    np.testing.assert_array_equal(whole.aggregate(g), longer.aggregate(g))
    assert EFSignSGD(5).start(comm, 0).aggregate(np.zeros(0, np.float32)).size == 0


def test_what_is_pending_in_buckets_goes_to_other_numbers_of_ranks() -> None:
    """The mean of the residuals, for other buckets too: none of it is lost."""

    def taken(comm: Any, bucket: int | None, states: Any) -> dict[str, Any]:
        aggregator = EFSignSGD(bucket).start(comm, N)
        if states is not None:
            aggregator.load_state_dict(states[comm.rank])
        else:
            for g in gradients():
                aggregator.aggregate(g * (comm.rank + 1))
        return aggregator.state_dict()

    old = run_local(3, lambda comm: taken(comm, 500, None))
    kinds = run_local(1, lambda comm: EFSignSGD(500).start(comm, N).state_kinds)[0]
    moved = redistribute(old, 2, kinds)
    new = run_local(2, lambda comm: taken(comm, 7, moved))
    before, after = (np.mean([state["residual"] for state in states], axis=0, dtype=float) for states in (old, new))
    assert np.abs(before).max() > 0
    np.testing.assert_allclose(after, before, rtol=2**-23)


@pytest.mark.parametrize("scale", ["none", "norm"])
def test_a_vector_of_zeros_gives_zeros(scale: str, comm: Communicator) -> None:
    for n in (1, N):
        assert not SSDM(scale=scale).start(comm, n).aggregate(np.zeros(n, np.float32)).any()
    half = np.zeros(256, np.float32)
    half[:128] = 1
    result = SSDM(scale=scale).start(comm, 256, tensor_lengths=(128, 128)).aggregate(half)
    assert result[:128].all()
    assert not result[128:].any()
    assert not EFSignSGD().start(comm, N).aggregate(np.zeros(N, np.float32)).any()


def test_zeros_of_the_majority_alternate_from_step_to_step(comm: Communicator) -> None:
    aggregator, zeros = MajorityVote().start(comm, N), np.zeros(N, np.float32)
    even, odd = aggregator.aggregate(zeros), aggregator.aggregate(zeros)
    np.testing.assert_array_equal(even, np.where(np.arange(N) % 2, 1, -1))
    np.testing.assert_array_equal(odd, -even)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_mean_over_steps_is_the_vector(momentum: float, comm: Communicator) -> None:
    """With momentum, what it has settled to."""
    x, steps = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3], np.float32), 4000
    aggregator = SSDM(momentum=momentum, scale="norm", seed=1).start(comm, 6)
    for _ in range(60 if momentum else 0):
        aggregator.aggregate(x)
    norm = float(np.linalg.norm(x.astype(np.float64)).astype(np.float32))
    ups = np.zeros(6, int)
    for _ in range(steps):
        result = aggregator.aggregate(x)
        assert (np.abs(result) == np.float32(norm)).all()
        ups += result > 0
    for i, value in enumerate(x):
        assert_binomial(ups[i], steps, 0.5 + float(value) / (2 * norm), f"element {i}")


def test_seeds_vectors_and_steps_draw_differently(comm: Communicator) -> None:
    x = np.zeros(N, np.float32)
    x[[0, -1]] = 1
    first = SSDM().start(comm, N)
    one = first.aggregate(x)
    for other in (first, SSDM(seed=1).start(comm, N), SSDM().start(comm, N, vector_id=1)):
        assert_binomial((other.aggregate(x) == one)[1:-1].sum(), N - 2, 0.5, "equal signs")


@pytest.mark.parametrize("options", [MajorityVote(seed=3), EFSignSGD(500)], ids=str)
def test_values_of_long_vectors_are_written_past_the_caches(options: Any, comm: Communicator) -> None:
    trial = Trial(options, 5 << 20, 1)
    results, state = trial.take(comm)
    trial.check(None, results, [state])
