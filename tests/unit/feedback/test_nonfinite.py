"""NaN and infinity: an error with their place, or a skipped step, and never a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from collectives import NonFiniteGradient
from mpicomp import Communicator
from mpicomp.algorithms import SSDM, Dense, EFSignSGD, MajorityVote, Marsit
from tests.methods import METHODS, must_be_restored

N = 4096 + 77
# where the one-bit kernels and the full-precision ones look, and every kind of residual
MARSITS = {name: method for name, method in METHODS.items() if isinstance(method, Marsit)}
every_marsit = pytest.mark.parametrize("options", MARSITS.values(), ids=MARSITS)
every_bad_value = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


def updates(steps: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(3).standard_normal((steps, N)).astype(dtype)


def spoiled(u: NDArray[Any], bad: float, position: int = 100) -> NDArray[Any]:
    result = u.copy()
    result[position] = bad
    return result


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_error_names_rank_vector_and_step_and_the_run_goes_on(method: Any, dtype: str, comm: Communicator) -> None:
    """A residual that an error has spoiled is neither gone on from nor given away until it is restored."""
    tried, untried = (method.start(comm, N, dtype=dtype, vector_id=7) for _ in range(2))
    bad = [(number, place) for place in (0, 4095, 4096, N - 1) for number in (np.nan, np.inf, -np.inf)]
    for step, u in enumerate(updates(3, dtype)):
        before = tried.state_dict()
        for number, place in bad:
            with pytest.raises(NonFiniteGradient, match=rf"vector 7, step {step}, from rank 0;") as caught:
                tried.aggregate(spoiled(u, number, place))
            assert caught.value.ranks == (0,)
            if must_be_restored(method, step):
                with pytest.raises(RuntimeError, match=r"rank 0 of 1, vector 7: .* restore it by load_state_dict"):
                    tried.aggregate(u)
                with pytest.raises(RuntimeError, match="its residual is spoiled"):
                    tried.state_dict()
                tried.load_state_dict(before)
            np.testing.assert_equal(tried.state_dict(), before)
        np.testing.assert_array_equal(tried.aggregate(u), untried.aggregate(u))


@every_marsit
@every_bad_value
def test_skipping_gives_zeros_and_leaves_the_residual_alone(options: Marsit, bad: float, comm: Communicator) -> None:
    chosen = {name: getattr(options, name) for name in ("full_precision_every", "residual", "compensation")}
    aggregator = Marsit(nonfinite="skip", global_step=options.global_step, **chosen).start(comm, N)
    given = updates(6)
    for t, u in enumerate(given):
        before = aggregator.state_dict()
        result = aggregator.aggregate(spoiled(u, bad) if t in (0, 3) else u)
        after = aggregator.state_dict()
        assert result.any() == (t not in (0, 3))
        assert (before.pop("step"), after.pop("step")) == (t, t + 1)
        if t in (0, 3):
            for name, value in before.items():
                np.testing.assert_array_equal(after[name], value, name)
    assert aggregator.feedback.skipped == 2


def test_skipping_costs_the_other_steps_nothing(comm: Communicator) -> None:
    """With rule "paper", what was pending before the skipped step is still subtracted after it."""
    for rule in ("own", "paper"):
        skipping, raising = (
            Marsit(None, residual=rule, nonfinite=policy, global_step=0.8).start(comm, N)
            for policy in ("skip", "raise")
        )
        for t, u in enumerate(updates(6)):
            if t == 3:
                skipping.aggregate(spoiled(u, np.nan))
            np.testing.assert_array_equal(skipping.aggregate(u), raising.aggregate(u))
            np.testing.assert_array_equal(skipping.state_dict()["residual"], raising.state_dict()["residual"])


@pytest.mark.parametrize(("dtype", "large"), [("float16", 3e4), ("float32", 3e38), ("float64", 1e308)])
def test_a_global_step_too_large_for_its_type_is_told(dtype: str, large: float, comm: Communicator) -> None:
    """Every value is finite, but gamma times their mean is not: results would be infinite and residuals NaN."""
    aggregator = Marsit(None).start(comm, 1, dtype=dtype)
    with pytest.raises(NonFiniteGradient, match="the global step of vector 0, step 0, from no rank") as caught:
        aggregator.aggregate(np.full(1, large, dtype))
    assert caught.value.ranks == ()


def test_an_automatic_step_of_zero_needs_no_limit(comm: Communicator) -> None:
    """0 times an infinite clip is no number, but nothing is clipped by it."""
    for dtype in ("float16", "float32"):
        aggregator = Marsit(None, clip=float("inf")).start(comm, N, dtype=dtype)
        for u in (np.zeros(N, dtype), *updates(2, dtype)):
            assert np.isfinite(aggregator.aggregate(u)).all()
            assert np.isfinite(aggregator.state_dict()["residual"]).all()


@pytest.mark.parametrize(("options", "told"), [(EFSignSGD(), "the scale of"), (SSDM(scale="norm"), "the norm of")])
def test_scales_beyond_the_results_type_are_told(options: Any, told: str, comm: Communicator) -> None:
    aggregator = options.start(comm, 4, dtype=np.float16)
    large = np.full(4, 6e4, np.float16)
    if isinstance(options, EFSignSGD):
        large[:] = 1
        aggregator.load_state_dict(aggregator.state_dict() | {"residual": np.full(4, 7e4, np.float32)})
    before = aggregator.state_dict()
    with pytest.raises(NonFiniteGradient, match=f"{told} vector 0, step 0, from no rank") as caught:
        aggregator.aggregate(large)
    assert caught.value.ranks == ()
    np.testing.assert_equal(aggregator.state_dict(), before)


def test_the_largest_numbers_have_finite_norms_and_results(comm: Communicator) -> None:
    for dtype in (np.float32, np.float64):
        largest = np.finfo(dtype).max if dtype == np.float32 else 1e150
        for options in (EFSignSGD(), SSDM(), SSDM(scale="norm"), MajorityVote()):
            assert np.isfinite(options.start(comm, 1000, dtype=dtype).aggregate(np.full(1000, largest, dtype))).all()


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_the_largest_numbers_of_a_type_are_no_infinity(kind: str, comm: Communicator) -> None:
    dtype = getattr(torch, kind)
    vector = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(Dense().start(comm, 100, dtype=kind).aggregate(vector), vector)
