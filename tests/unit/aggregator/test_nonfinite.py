"""NaN and infinity: an error that says where, or a step skipped, and never a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import NonFiniteGradient
from mpicomp import Communicator
from mpicomp.algorithms import (
    ECQSGD,
    QSGD,
    SSDM,
    CascadingSSDM,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    MajorityVote,
    Marsit,
    MemSGD,
    OneBitSGD,
    RandomK,
    ScaleCom,
    TernGrad,
    TrueTopK,
)

N = 4096 + 77
# where the one-bit kernels and the full-precision ones look, and every kind of residual
MARSITS = {
    "own": Marsit(None),
    "own, full precision": Marsit(1),
    "paper": Marsit(4, residual="paper"),
    "no residual": Marsit(None, compensation=False),
    "stateless": Marsit(None, compensation=False, global_step=1.0),
}
# methods that keep nothing, or change nothing before they know
UNTOUCHED = (
    Dense(),
    CascadingSSDM(),
    CascadingSSDM(normalise=True),
    MajorityVote(),
    EFSignSGD(),
    SSDM(),
    SSDM(momentum=0.9, scale="norm", coding="elias"),
    QSGD(),
    ECQSGD(alpha=0.1),
    TernGrad(),
    OneBitSGD(),
    DoubleSqueeze(),
    MemSGD("top-k:rate=10"),
    LocalTopK(10),
    ScaleCom(10),
    ScaleCom(10, chunk=30, beta=0.5),
    RandomK(10),
    TrueTopK(10),
)
every_marsit = pytest.mark.parametrize("options", MARSITS.values(), ids=MARSITS)
every_bad_value = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


def updates(steps: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(3).standard_normal((steps, N)).astype(dtype)


def spoiled(u: NDArray[Any], bad: float, position: int = 100) -> NDArray[Any]:
    result = u.copy()
    result[position] = bad
    return result


@every_marsit
@every_bad_value
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_raises_and_names_rank_vector_and_step(options: Marsit, bad: float, dtype: str, comm: Communicator) -> None:
    for step in (0, 2):
        for position in (0, 4095, 4096, N - 1):
            aggregator = options.start(comm, N, dtype=dtype, vector_id=7)
            given = updates(step + 1, dtype)
            for u in given[:-1]:
                aggregator.aggregate(u)
            with pytest.raises(NonFiniteGradient, match=rf"vector 7, step {step}, from rank 0;") as caught:
                aggregator.aggregate(spoiled(given[-1], bad, position))
            assert caught.value.ranks == (0,)


@pytest.mark.parametrize("name", ["no residual", "stateless"])
def test_without_a_residual_it_goes_on_after_raising(name: str, comm: Communicator) -> None:
    tried = MARSITS[name].start(comm, N)
    u = updates(1)[0]
    first = tried.aggregate(u)
    with pytest.raises(NonFiniteGradient):
        tried.aggregate(spoiled(u, np.nan))
    np.testing.assert_array_equal(tried.aggregate(u), first)


@pytest.mark.parametrize("options", [one for one in MARSITS.values() if one.compensation], ids=str)
def test_after_raising_it_refuses_until_it_is_restored(options: Marsit, comm: Communicator) -> None:
    tried, untried = options.start(comm, N), options.start(comm, N)
    given = updates(6)
    for u in given[:3]:
        tried.aggregate(u)
        untried.aggregate(u)
    state = tried.state_dict()
    with pytest.raises(NonFiniteGradient):
        tried.aggregate(spoiled(given[3], np.nan))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"rank 0 of 1, vector 0: .* restore it by load_state_dict, or start\(\) anew"
        ):
            tried.aggregate(given[3])
    tried.load_state_dict(state)
    for u in given[3:]:
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
    assert aggregator.skipped == 2


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


@every_bad_value
@pytest.mark.parametrize("method", UNTOUCHED, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_methods_whose_state_is_left_alone_raise_and_go_on(
    method: Any, bad: float, dtype: str, comm: Communicator
) -> None:
    aggregator, untried = method.start(comm, N, dtype=dtype), method.start(comm, N, dtype=dtype)
    (u,) = updates(1, dtype)
    for position in (0, N - 1):
        with pytest.raises(NonFiniteGradient, match="vector 0, step 0, from rank 0;") as caught:
            aggregator.aggregate(spoiled(u, bad, position))
        assert caught.value.ranks == (0,)
    np.testing.assert_array_equal(aggregator.aggregate(u), untried.aggregate(u))
