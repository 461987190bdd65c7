"""Cascading compression on one rank: one stochastic sign of each chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.execution.partition import partition
from collectives.schedules.registry import topology as topology_of
from mpicomp import Communicator
from mpicomp.algorithms import CascadingSSDM
from mpicomp.codecs.stochastic_sign import norm
from mpicomp.kernels.streams import Stream
from tests.reference.signs import unpack_bits
from tests.reference.statistics import assert_binomial
from tests.reference.stochastic_signs import stochastic_bits

N = 3 * 4096 + 65


def vector(n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(n).standard_normal(n).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("topology", ["ring", "halving-doubling"])
def test_each_chunk_is_the_reference_s_signs_times_its_norm(topology: Any, dtype: Any, comm: Communicator) -> None:
    x = vector(dtype=dtype)
    wide = x.astype(np.float32)
    key = Stream(5, 3, "stochastic sign").key()
    with Communicator(comm.mpi_comm, topology) as other:
        aggregator = CascadingSSDM(seed=5).start(other, N, dtype=dtype, vector_id=3)
        chunks = partition(N, topology_of(topology).plan(0, 1).n_chunks, 4096)
        for step in range(3):
            result = aggregator.aggregate(x)
            for cut in chunks:
                part, scale = wide[cut.start : cut.stop], norm(wide[cut.start : cut.stop])
                up = unpack_bits(stochastic_bits(part, scale, key, cut.start // 512, step, 0), part.size)
                np.testing.assert_array_equal(result[cut.start : cut.stop], np.where(up, scale, -scale).astype(dtype))


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
