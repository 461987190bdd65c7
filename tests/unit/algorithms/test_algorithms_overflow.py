"""Vectors that are finite, but whose sums, norms or float32 forms are not: no error blames NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import NonFiniteGradient
from mpicomp import Communicator, run_local
from mpicomp.algorithms import (
    ALGORITHMS,
    SSDM,
    Algorithm,
    CascadingSSDM,
    Dense,
    DoubleSqueeze,
    Marsit,
    MemSGD,
    PowerSGD,
    RandomK,
    ScaleCom,
    TrueTopK,
)
from mpicomp.codecs import Clipping, RandomSparsification, TopK, TwoMeans

N = 300
METHODS: list[Algorithm] = [
    *(method() for method in ALGORITHMS.values()),
    Dense(wire="float16"),
    Dense(wire="bfloat16"),
    Marsit(None),
    Marsit(3, residual="paper"),
    Marsit(None, clip=np.inf),
    Marsit(None, compensation=False),
    Marsit(None, nonfinite="skip"),
    SSDM(momentum=0.9, scale="norm", coding="elias"),
    DoubleSqueeze(Clipping(9)),
    DoubleSqueeze(RandomSparsification(0.5)),
    DoubleSqueeze(TopK(10, double=True)),
    MemSGD(TwoMeans(64)),
    PowerSGD(2, start_step=0),
    ScaleCom(10, beta=0.5, warmup_steps=1),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])


def outcome(aggregator: Any, vector: NDArray[Any]) -> tuple[NDArray[Any] | None, tuple[int, ...]]:
    """The result, or None and the ranks that the error names."""
    try:
        return aggregator.aggregate(vector), ()
    except NonFiniteGradient as error:
        return None, error.ranks


def vectors(dtype: str, rank: int) -> list[NDArray[Any]]:
    """Four steps of one rank: ordinary, all of the largest number, of any magnitude, and ordinary again."""
    rng, most = np.random.default_rng((7, rank)), np.finfo(dtype).max
    ordinary, any_magnitude = rng.standard_normal((2, N))
    exponents = rng.uniform(np.log10(np.finfo(dtype).smallest_subnormal), np.log10(float(most)), N)
    scaled = np.clip(np.sign(any_magnitude) * 10**exponents, -most, most)
    return [ordinary.astype(dtype), np.full(N, most, dtype), scaled.astype(dtype), ordinary.astype(dtype)]


@every_method
@every_dtype
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_finite_vectors_give_finite_results_or_an_error_that_names_nobody(
    method: Algorithm, dtype: str, ranks: int
) -> None:
    def work(comm: Communicator) -> None:
        aggregator = method.start(comm, N, dtype=dtype)
        for vector in vectors(dtype, comm.rank):
            state = aggregator.state_dict()
            result, named = outcome(aggregator, vector)
            assert named == ()
            if result is None:
                if isinstance(method, Marsit):
                    aggregator.load_state_dict(state)
                for key, entry in aggregator.state_dict().items():
                    np.testing.assert_array_equal(entry, state[key])
            else:
                assert np.isfinite(result).all()
            aggregator.check_state_dict(aggregator.state_dict())  # finite

    run_local(ranks, work)


@every_method
@every_dtype
def test_ranks_with_nan_or_infinity_are_named_beside_others_that_overflow(method: Algorithm, dtype: str) -> None:
    def work(comm: Communicator) -> None:
        aggregator = method.start(comm, N, dtype=dtype)
        vector = np.full(N, np.finfo(dtype).max, dtype)
        if comm.rank == 1:
            vector[-1] = np.nan
        if getattr(method, "nonfinite", None) == "skip":
            assert not aggregator.aggregate(vector).any()
            return
        with pytest.raises(NonFiniteGradient) as caught:
            aggregator.aggregate(vector)
        assert caught.value.ranks == (1,)

    run_local(3, work)


@pytest.mark.parametrize("magnitude", [1e39, 1e160, 1e300])
def test_norms_of_float64_vectors_whose_squares_overflow_are_measured(magnitude: float, comm: Communicator) -> None:
    found = SSDM(scale="norm").start(comm, N, dtype="float64").aggregate(np.full(N, magnitude))
    np.testing.assert_allclose(np.abs(found), magnitude * np.sqrt(N), rtol=1e-12)
    assert 0.5 < (found > 0).mean() < 0.6  # 1/2 + 1/(2 sqrt(300)), not a fair coin


def test_a_norm_beyond_float64_is_its_largest_number_and_signs_stay_unbiased(comm: Communicator) -> None:
    n, most = 200_000, np.finfo(np.float64).max
    vector = np.full(n, most)
    vector[1:] = most / 2
    found = SSDM(scale="norm").start(comm, n, dtype="float64").aggregate(vector)
    assert (np.abs(found) == most).all()
    assert found[0] == most  # with certainty
    assert (found[1:] > 0).mean() == pytest.approx(0.75, abs=0.005)


def test_cascading_holds_float64_beyond_float32_at_its_largest_number(comm: Communicator) -> None:
    found = CascadingSSDM().start(comm, N, dtype="float64").aggregate(np.full(N, 1e300))
    assert (np.abs(found) == np.finfo(np.float32).max).all()


@pytest.mark.parametrize("n", [64, 65])  # whole words, and what is left
def test_a_residual_without_a_bound_that_overflows_is_told_at_once(n: int, comm: Communicator) -> None:
    """Rule "paper" keeps u + c, which no result shows until the next full-precision round."""
    aggregator = Marsit(None, residual="paper", global_step=1.0).start(comm, n)
    vector = np.zeros(n, np.float32)
    vector[-1] = 3e38
    aggregator.aggregate(vector)
    with pytest.raises(NonFiniteGradient, match=r"from no rank \(the sum overflowed\)"):
        aggregator.aggregate(vector)


def test_a_residual_that_is_not_clipped_is_held_at_the_largest_number(comm: Communicator) -> None:
    aggregator = Marsit(None, clip=np.inf, global_step=1.0).start(comm, 65)
    for _ in range(3):
        aggregator.aggregate(np.full(65, 3e38, np.float32))
    assert (aggregator.state_dict()["residual"] == np.finfo(np.float32).max).all()


@pytest.mark.parametrize("method", [Marsit(None), Marsit(2)], ids=str)
def test_marsit_goes_on_after_a_global_step_that_overflowed(method: Marsit) -> None:
    def work(comm: Communicator) -> None:
        aggregator = method.start(comm, N)
        large, ordinary = (np.full(N, magnitude, np.float32) for magnitude in (1e38, 1))
        if method.full_precision_every is not None:
            aggregator.aggregate(large)
        with pytest.raises(NonFiniteGradient, match="the global step of vector 0"):
            aggregator.aggregate(large)
        for _ in range(3):
            assert np.isfinite(aggregator.aggregate(ordinary)).all()

    run_local(2, work)


@pytest.mark.parametrize("method", [ScaleCom(10), RandomK(10), TrueTopK(10), RandomK(10, warmup_steps=1)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_mean_that_is_not_finite_never_becomes_a_result(
    method: Algorithm, bad: float, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever summed the numbers wrongly: each of them was finite, and small."""
    correct = comm.dense_steps

    def dense_steps(call: Any, values: Any, dtype: str, mean: bool, out: Any, *others: Any) -> Iterator[bool]:
        yield from correct(call, values, dtype, mean, out, *others)
        out[-1] = bad

    monkeypatch.setattr(comm, "dense_steps", dense_steps)
    with pytest.raises(NonFiniteGradient, match="from no rank"):
        method.start(comm, N).aggregate(np.ones(N, np.float32))
