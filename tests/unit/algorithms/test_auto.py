"""Auto by a clock of the test's own: what is chosen when, what results are then, and that nothing pending is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import (
    ECQSGD,
    QSGD,
    Auto,
    Communicator,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    Marsit,
    ScaleCom,
    run_local,
)
from mpicomp.algorithms import Aggregator
from mpicomp.reducers.trials import Side, Stage
from tests.exact import gradient

N, RANKS = 3001, 3
TRIAL = 5  # steps: blocks of 3 in the brief trial, of 5 in the full one
BRIEF, FULL = 2 * 3, 6 * 5
COMPRESSING: tuple[Any, ...] = (
    Marsit(7),
    Marsit(None, residual="paper"),
    ScaleCom(10),
    DoubleSqueeze(),
    ECQSGD(alpha=0.3),
    EFSignSGD(),
    QSGD(),
)


class Clock:
    """Tells what calls take, and what goes on behind them."""

    def __init__(self, dense_s: float, compressed_s: float, behind_s: float = 0.0) -> None:
        self.now, self.behind_s = 0.0, behind_s
        self.seconds = dense_s, compressed_s

    def __call__(self) -> float:
        return self.now

    def start(self, comm: Communicator, method: Auto, **given: Any) -> Aggregator:
        """An aggregator that goes by this clock."""
        aggregator = method.start(comm, N, **given)
        aggregator.traffic.clock = self
        one: Any = aggregator.reducer
        for reducer, seconds in zip((one._dense, one._compressing), self.seconds, strict=True):
            reducer.steps = partial(self._timed, reducer.steps, seconds)
        return aggregator

    def _timed(self, steps: Any, seconds: float, call: Any) -> Iterator[bool]:
        yield from steps(call)
        self.now += seconds

    def step(self, aggregator: Aggregator, vector: Any) -> Any:
        """Take a step, as long as what is behind it takes at least."""
        start = self.now
        result = aggregator.aggregate(vector)
        self.now = max(self.now, start + self.behind_s)
        return result


def plan(aggregator: Aggregator) -> Any:
    reducer: Any = aggregator.reducer
    return reducer.plan


def on_all(work: Callable[[Communicator], Any], ranks: int = RANKS) -> Any:
    results = run_local(ranks, work)
    for other in results[1:]:
        np.testing.assert_equal(other, results[0])
    return results[0]


@pytest.mark.parametrize("method", COMPRESSING, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_where_dense_is_faster_results_are_those_of_dense_from_the_decision_on(method: Any, dtype: str) -> None:
    def work(comm: Communicator) -> int:
        clock = Clock(1.0, 3.0)
        auto, dense = clock.start(comm, Auto(method, TRIAL), dtype=dtype), Dense().start(comm, N, dtype=dtype)
        for step in range(BRIEF + 10):
            vector = gradient(comm.rank, step, N, dtype)
            result, exact = clock.step(auto, vector), dense.aggregate(vector)
            if step > BRIEF or step < BRIEF // 2:  # the first dense step behind the trial has all that was pending
                np.testing.assert_array_equal(result, exact)
        return int(plan(auto).side)

    assert on_all(work) is Side.DENSE.value


@pytest.mark.parametrize("method", COMPRESSING, ids=str)
@pytest.mark.parametrize(
    ("dense_s", "began"), [(10.0, BRIEF // 2), (2.0, BRIEF + FULL - 10)], ids=["far faster", "faster"]
)
def test_where_compressing_is_faster_results_are_those_of_the_method_started_at_the_step_of_the_switch(
    method: Any, dense_s: float, began: int
) -> None:
    """That is the last one before the decision: trials end compressed."""

    def work(comm: Communicator) -> None:
        clock = Clock(dense_s, 1.0)
        auto, alone = clock.start(comm, Auto(method, TRIAL)), method.start(comm, N)
        alone.load_state_dict(alone.state_dict() | {"step": began})
        for step in range(BRIEF + FULL + 12):
            vector = gradient(comm.rank, step, N)
            result = clock.step(auto, vector)
            if step >= began:
                np.testing.assert_array_equal(result, alone.aggregate(vector))
        assert (plan(auto).stage, plan(auto).side) == (Stage.CHOSEN, Side.COMPRESSED)

    on_all(work)


@pytest.mark.parametrize("method", COMPRESSING, ids=str)
def test_nothing_is_lost_or_counted_twice_when_compressing_is_left(method: Any) -> None:
    """The results' sum is that of the means, but for rounding, of methods that lose nothing themselves."""

    def work(comm: Communicator) -> NDArray[Any]:
        clock = Clock(1.0, 3.0)
        auto, dense = clock.start(comm, Auto(method, TRIAL)), Dense().start(comm, N)
        difference = np.zeros(N)
        for step in range(BRIEF + 2):
            vector = gradient(comm.rank, step, N)
            if step == BRIEF:
                pending = auto.state_dict()
            result = clock.step(auto, vector)
            difference += dense.aggregate(vector).astype(np.float64) - result
        assert all(not np.any(auto.state_dict()[key]) for key in ("residual", "owner_error") if key in pending)
        return difference

    lossy = isinstance(method, QSGD) or method == COMPRESSING[0] or isinstance(method, ECQSGD)
    difference = np.abs(on_all(work)).max()
    assert difference < 1e-4 or lossy


def test_compressing_that_shortens_calls_but_not_steps_is_not_chosen() -> None:
    def work(comm: Communicator) -> int:
        clock = Clock(0.9, 0.1, behind_s=1.0)
        auto = clock.start(comm, Auto(trial_steps=TRIAL))
        for step in range(BRIEF + FULL + 2):
            clock.step(auto, gradient(comm.rank, step, N))
        assert plan(auto).stage is Stage.CHOSEN
        return int(plan(auto).side)

    assert on_all(work) is Side.DENSE.value
