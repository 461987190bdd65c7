"""Vectors that are finite, but whose sums, norms or float32 forms are not: no error blames NaN."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import NonFiniteGradient
from mpicomp import Communicator, run_local
from mpicomp.algorithms import (
    ECQSGD,
    SSDM,
    Algorithm,
    CascadingSSDM,
    DoubleSqueeze,
    Marsit,
    MemSGD,
    RandomK,
    Relay,
    ScaleCom,
    TrueTopK,
)
from mpicomp.codecs import TopK
from tests.methods import METHODS, must_be_restored

N, STEPS = 300, 4
CODECS = "two-means:bucket=100", "quantize:bucket=100", "ternary:bucket=100", "top-k:rate=7", "clip:bits=11"
CODECS += "levels", "levels:levels=3,bucket=64"
FORMS: dict[str, Any] = METHODS | {
    "marsit, no bound": Marsit(None, clip=np.inf),
    "marsit, skipping": Marsit(None, nonfinite="skip"),
    "ecq-sgd, much": ECQSGD(alpha=1.5, beta=0.9, bucket=100, norm="linf"),
    "mem-sgd, two means": MemSGD("two-means:bucket=64"),
    **{f"relay, {levels} levels": Relay(levels) for levels in (2, 3, 8, 256)},
    "scalecom, warm": ScaleCom(10, beta=0.5, warmup_steps=1),
    "double-squeeze, pairs": DoubleSqueeze(TopK(10, double=True)),
    **{f"double-squeeze, {codec}": DoubleSqueeze(codec) for codec in CODECS},
}
every_form = pytest.mark.parametrize("name", FORMS)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])


def outcome(aggregator: Any, vector: NDArray[Any]) -> tuple[NDArray[Any] | None, str, tuple[int, ...]]:
    """Return the result, or None, the error expected on every rank, and the ranks that it names."""
    try:
        return aggregator.aggregate(vector), "", ()
    except NonFiniteGradient as error:
        return None, re.sub(r"^rank \d+ of", "rank ? of", str(error)), error.ranks


def mixed(dtype: str, rank: int, ranks: int) -> list[NDArray[Any]]:
    """Four steps of one rank: ordinary, all of the largest number, of any magnitude, and ordinary again."""
    rng, most = np.random.default_rng((7, rank)), np.finfo(dtype).max
    ordinary, any_magnitude = rng.standard_normal((2, N))
    exponents = rng.uniform(np.log10(np.finfo(dtype).smallest_subnormal), np.log10(float(most)), N)
    scaled = np.clip(np.sign(any_magnitude) * 10**exponents, -most, most)
    return [ordinary.astype(dtype), np.full(N, most, dtype), scaled.astype(dtype), ordinary.astype(dtype)]


def huge(pattern: str, dtype: str, rank: int, ranks: int) -> list[NDArray[Any]]:
    """Vectors near the end of a type's range, and within a tenth of it on the first step."""
    found = []
    for step in range(STEPS):
        largest = float(np.finfo(dtype).max) * (0.09 if step == 0 else 0.99)
        rng = np.random.default_rng((rank, step))
        if pattern == "one rank":
            vector = np.full(N, largest if rank == ranks - 1 else 1)
        elif pattern == "ups and downs":
            vector = largest * rng.choice([-1, 0, 1], N)
        else:
            vector = largest * rng.uniform(0.3, 1, N)
        found.append(vector.astype(dtype))
    return found


TRIED = [
    *((3, dtype, mixed) for dtype in ("float16", "float32", "float64")),
    *((1, "float32", mixed), (2, "float16", mixed), (2, "float64", mixed)),
    *((3, dtype, partial(huge, "ups and downs")) for dtype in ("float32", "float64")),
    *((3, dtype, partial(huge, "all ranks")) for dtype in ("float16", "float32")),
    (3, "float32", partial(huge, "one rank")),
]


@every_form
def test_finite_vectors_give_finite_results_or_one_error_that_names_nobody_and_changes_nothing(name: str) -> None:
    method, errors = FORMS[name], 0
    for ranks, dtype, vectors in TRIED:

        def take(comm: Communicator, dtype: str = dtype, vectors: Any = vectors) -> list[bytes | str]:
            tried, untried = (method.start(comm, N, dtype=dtype) for _ in range(2))
            found: list[bytes | str] = []
            for step, vector in enumerate(vectors(dtype, comm.rank, comm.size)):
                before = tried.state_dict()
                result, error, named = outcome(tried, vector)
                assert named == ()
                found.append(error if result is None else result.tobytes())
                if result is not None:
                    assert np.isfinite(result).all()
                    np.testing.assert_array_equal(result, untried.aggregate(vector))
                    continue
                if must_be_restored(method, step):
                    tried.load_state_dict(before)
                elif "the global step" in error:
                    before["magnitudes"][:] = np.nan  # the next step measures again, or it would fail for ever
                np.testing.assert_equal(tried.state_dict(), before)
            tried.check_state_dict(tried.state_dict())  # finite
            return found

        of_ranks = run_local(ranks, take)
        assert all(found == of_ranks[0] for found in of_ranks), (ranks, dtype, vectors)
        errors += sum(isinstance(one, str) for one in of_ranks[0])
    if name == "double-squeeze":
        assert errors  # or there was nothing to see


@every_form
@every_dtype
def test_ranks_with_nan_or_infinity_are_named_beside_others_that_overflow(name: str, dtype: str) -> None:
    method = FORMS[name]

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
