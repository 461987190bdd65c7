"""Cascading compression on one rank: one stochastic sign of each chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import Communicator
from mpicomp.algorithms import CascadingSSDM
from mpicomp.codecs.stochastic_sign import norm
from tests.reference.statistics import assert_binomial

N = 3 * 4096 + 65


def vector(n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(n).standard_normal(n).astype(dtype)


def test_the_mean_over_steps_is_the_vector(comm: Communicator) -> None:
    x = np.array([0.75, -0.5, 0.25, 0.0, -0.125, 0.3], np.float32)
    aggregator, steps = CascadingSSDM().start(comm, 6), 2000
    ups = sum((aggregator.aggregate(x) > 0).astype(int) for _ in range(steps))
    for i, value in enumerate(x):
        assert_binomial(ups[i], steps, 0.5 + value / (2 * float(norm(x))), f"element {i}")


def test_normalised_results_have_the_vector_s_norm_and_the_same_signs(comm: Communicator) -> None:
    x = vector()
    plain, normalised = CascadingSSDM().start(comm, N), CascadingSSDM(normalise=True).start(comm, N)
    for _ in range(3):
        result = normalised.aggregate(x)
        assert norm(result) == pytest.approx(norm(x), rel=1e-6)
        np.testing.assert_array_equal(np.sign(result), np.sign(plain.aggregate(x)))


@pytest.mark.parametrize("normalise", [False, True])
def test_zeros_stay_exactly_zero(normalise: bool, comm: Communicator) -> None:
    for n in (1, N):
        assert not CascadingSSDM(normalise).start(comm, n).aggregate(np.zeros(n, np.float32)).any()


def test_seeds_and_vectors_draw_differently(comm: Communicator) -> None:
    x = np.zeros(N, np.float32)
    x[[0, -1]] = 1
    first = CascadingSSDM().start(comm, N).aggregate(x)
    for seed, vector_id in ((1, 0), (0, 1)):
        second = CascadingSSDM(seed=seed).start(comm, N, vector_id=vector_id).aggregate(x)
        assert_binomial((np.sign(first) == np.sign(second))[1:].sum(), N - 1, 0.5, "equal signs")
