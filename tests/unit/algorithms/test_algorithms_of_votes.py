"""Methods of counted and of cascaded signs on one rank: long vectors, buckets, zeros, unbiased draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import SSDM, CascadingSSDM, Communicator, EFSignSGD, MajorityVote, Marsit
from mpicomp.codecs.stochastic_sign import norm
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


@pytest.mark.parametrize(
    "options",
    [SSDM(), SSDM(scale="norm"), EFSignSGD(), CascadingSSDM(), CascadingSSDM(normalise=True), Marsit(None)],
    ids=str,
)
def test_a_vector_of_zeros_gives_zeros(options: Any, comm: Communicator) -> None:
    for n in (1, N):
        aggregator = options.start(comm, n)
        for _ in range(3):
            assert not aggregator.aggregate(np.zeros(n, np.float32)).any()
    if options.uses_tensor_lengths:
        half = np.zeros(256, np.float32)
        half[:128] = 1
        result = options.start(comm, 256, tensor_lengths=(128, 128)).aggregate(half)
        assert result[:128].all()
        assert not result[128:].any()


def test_zeros_of_the_majority_alternate_from_step_to_step(comm: Communicator) -> None:
    aggregator, zeros = MajorityVote().start(comm, N), np.zeros(N, np.float32)
    even, odd = aggregator.aggregate(zeros), aggregator.aggregate(zeros)
    np.testing.assert_array_equal(even, np.where(np.arange(N) % 2, 1, -1))
    np.testing.assert_array_equal(odd, -even)


@pytest.mark.parametrize("options", [SSDM(scale="norm", seed=1), SSDM(0.5, "norm", seed=1), CascadingSSDM()], ids=str)
def test_the_mean_over_steps_is_the_vector(options: Any, comm: Communicator) -> None:
    """With momentum, what it has settled to."""
    x, steps = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3], np.float32), 4000
    aggregator, length, ups = options.start(comm, 6), float(norm(x)), np.zeros(6, int)
    for _ in range(60 if options == SSDM(0.5, "norm", seed=1) else 0):
        aggregator.aggregate(x)
    for _ in range(steps):
        result = aggregator.aggregate(x)
        assert (np.abs(result) == np.float32(length)).all()
        ups += result > 0
    for i, value in enumerate(x):
        assert_binomial(ups[i], steps, 0.5 + float(value) / (2 * length), f"element {i}")


def test_normalised_results_have_the_vector_s_norm_and_the_same_signs(comm: Communicator) -> None:
    x = gradients()[0]
    plain, normalised = CascadingSSDM().start(comm, N), CascadingSSDM(normalise=True).start(comm, N)
    for _ in range(3):
        result = normalised.aggregate(x)
        assert norm(result) == pytest.approx(norm(x), rel=1e-6)
        np.testing.assert_array_equal(np.sign(result), np.sign(plain.aggregate(x)))


@pytest.mark.parametrize("method", [SSDM, CascadingSSDM])
def test_seeds_vectors_and_steps_draw_differently(method: Any, comm: Communicator) -> None:
    x = np.zeros(N, np.float32)
    x[[0, -1]] = 1
    first = method().start(comm, N)
    one = np.sign(first.aggregate(x))
    for other in (first, method(seed=1).start(comm, N), method().start(comm, N, vector_id=1)):
        assert_binomial((np.sign(other.aggregate(x)) == one)[1:-1].sum(), N - 2, 0.5, "equal signs")


@pytest.mark.parametrize("options", [MajorityVote(seed=3), EFSignSGD(500)], ids=str)
def test_values_of_long_vectors_are_written_past_the_caches(options: Any, comm: Communicator) -> None:
    trial = Trial(options, 5 << 20, 1)
    results, state = trial.take(comm)
    trial.check(None, results, [state])
