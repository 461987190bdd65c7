"""Auto by a clock of the test's own: its choices, its results, and residuals that are not lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import (
    ECQSGD,
    QSGD,
    SSDM,
    Auto,
    Communicator,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    MajorityVote,
    Marsit,
    ScaleCom,
    algorithm,
    redistribute,
    run_local,
)
from mpicomp.algorithms import Aggregator
from mpicomp.auto.trials import Side, Stage
from tests.exact import gradient

N, RANKS = 3001, 3
TRIAL = 5  # steps: blocks of 3 in the brief trial, of 4 in the full one
BRIEF, FULL = 2 * 3, 4 * 3 * 4
COMPRESSING: tuple[Any, ...] = (
    Marsit(7),
    Marsit(None, residual="paper"),
    ScaleCom(10),
    DoubleSqueeze(),
    ECQSGD(alpha=0.3),
    EFSignSGD(),
    QSGD(),
    Dense(wire="float16"),
)


class Clock:
    """Clock that gives calls, and the work behind them, a set duration."""

    def __init__(self, dense_s: float, compressed_s: float, behind_s: float = 0.0) -> None:
        self.now, self.behind_s = 0.0, behind_s
        self.seconds = dense_s, compressed_s

    def __call__(self) -> float:
        return self.now

    def start(self, comm: Communicator, method: Auto, **given: Any) -> Aggregator:
        """An aggregator that goes by this clock."""
        aggregator = method.start(comm, N, **given)
        aggregator.traffic.clock = self
        one: Any = aggregator.driver
        for driver, seconds in zip((one._dense, one._compressing), self.seconds, strict=True):
            driver.steps = partial(self._timed, driver.steps, seconds)
        return aggregator

    def _timed(self, steps: Any, seconds: float, call: Any) -> Iterator[bool]:
        yield from steps(call)
        self.now += seconds

    def step(self, aggregator: Aggregator, vector: Any) -> Any:
        """Take a step, at least as long as the work behind it."""
        start = self.now
        result = aggregator.aggregate(vector)
        self.now = max(self.now, start + self.behind_s)
        return result


def plan(aggregator: Aggregator) -> Any:
    driver: Any = aggregator.driver
    return driver.plan


def errors(state: dict[str, Any]) -> list[str]:
    """The entries that are pending."""
    return [key for key in ("residual", "worker_error", "owner_error") if key in state]


def on_all(work: Callable[[Communicator], Any], ranks: int = RANKS) -> Any:
    results = run_local(ranks, work)
    for other in results[1:]:
        np.testing.assert_equal(other, results[0])
    return results[0]


def test_a_call_has_the_vector_alone_again_once_its_step_has_ended() -> None:
    """A death after it has the survivors repeat the step: pending errors must not be added twice."""

    def work(comm: Communicator) -> bool:
        aggregator = Clock(1.0, 2.0).start(comm, Auto(Marsit(7), trial_steps=TRIAL))
        kept = []
        for step in range(BRIEF + FULL):
            # not read-only, since kernels get a view of such a vector
            vector = gradient(comm.rank, step, N).copy()
            handle = aggregator.begin(vector)
            call = handle._call
            handle.wait()
            kept.append(call.values is vector)
        return all(kept)

    assert all(run_local(RANKS, work))


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
    ("dense_s", "began"), [(10.0, BRIEF // 2), (2.0, BRIEF + FULL - 2 * 4)], ids=["far faster", "faster"]
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


@pytest.mark.parametrize("method", [*COMPRESSING, ScaleCom(10, beta=0.4)], ids=str)
def test_nothing_is_lost_or_counted_twice_when_compressing_is_left(method: Any) -> None:
    """The results' sum is that of the means, but for rounding, of methods that lose nothing themselves."""

    def work(comm: Communicator) -> NDArray[Any]:
        clock = Clock(1.0, 3.0)
        auto, dense = clock.start(comm, Auto(method, TRIAL)), Dense().start(comm, N)
        difference = np.zeros(N)
        for step in range(BRIEF + 2):
            vector = gradient(comm.rank, step, N)
            result = clock.step(auto, vector)
            difference += dense.aggregate(vector).astype(np.float64) - result
        left = auto.state_dict()
        assert not any(np.any(left[key]) for key in errors(left))
        return difference

    lossy = isinstance(method, QSGD | Dense) or method == COMPRESSING[0] or isinstance(method, ECQSGD)
    difference = np.abs(on_all(work)).max()
    assert difference < 1e-4 or lossy


def test_a_dense_step_that_fails_leaves_the_vector_without_pending_errors() -> None:
    """Survivors of a death repeat the step from it."""

    def work(comm: Communicator) -> None:
        clock = Clock(1.0, 3.0)
        auto = clock.start(comm, Auto(DoubleSqueeze(), TRIAL))
        for step in range(BRIEF):
            clock.step(auto, gradient(comm.rank, step, N))
        driver: Any = auto.driver
        calls = []

        def fail(call: Any) -> Iterator[bool]:
            calls.append((call, call.values))
            yield True
            raise RuntimeError("a rank died")

        driver._dense.steps = fail
        vector = gradient(comm.rank, BRIEF, N)
        with pytest.raises(RuntimeError, match="a rank died"):
            auto.aggregate(vector)
        ((call, values),) = calls
        assert not np.array_equal(values, vector)
        np.testing.assert_array_equal(call.values, vector)

    on_all(work)


def go(clock: Clock, comm: Communicator, auto: Aggregator, steps: int) -> Any:
    """Take so many steps; the plan afterwards."""
    for _ in range(steps):
        clock.step(auto, gradient(comm.rank, auto.step, N))
    return plan(auto)


def test_compressing_that_shortens_calls_but_not_steps_is_not_chosen() -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        clock = Clock(0.9, 0.1, behind_s=1.0)
        found = go(clock, comm, clock.start(comm, Auto(trial_steps=TRIAL)), BRIEF + FULL + 1)
        return found.stage, found.side

    assert on_all(work) == (Stage.CHOSEN, Side.DENSE)


def test_the_slowest_rank_counts() -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        clock = Clock(2.0, 5.0 if comm.rank == 1 else 0.1)
        found = go(clock, comm, clock.start(comm, Auto(trial_steps=TRIAL)), BRIEF + 1)
        return found.stage, found.side

    assert on_all(work) == (Stage.CHOSEN, Side.DENSE)


def several(
    comm: Communicator, seconds: list[tuple[float, float]], mixing_s: float = 0.0
) -> Iterator[tuple[Clock, list[Aggregator]]]:
    """Vectors with times of their own on one clock; a step in which the ways differ takes longer."""
    clock, autos = Clock(0, 0), []
    for number, clock.seconds in enumerate(seconds):
        autos.append(clock.start(comm, Auto(trial_steps=TRIAL), vector_id=number))
    while True:
        ways = []
        for auto in autos:
            auto.aggregate(gradient(comm.rank, auto.step, N))
            driver: Any = auto.driver
            ways.append(driver.compressed)
        clock.now += mixing_s * (len(set(ways)) > 1)
        yield clock, autos


@pytest.mark.parametrize(
    ("mixing_s", "sides"),
    [(0.0, [Side.COMPRESSED, Side.DENSE]), (2.0, [Side.COMPRESSED, Side.COMPRESSED])],
    ids=["mixture", "mixture that takes longer"],
)
def test_each_vector_goes_its_way_unless_steps_of_the_mixture_take_longer(mixing_s: float, sides: list[Side]) -> None:
    def work(comm: Communicator) -> list[Side]:
        steps = several(comm, [(3.0, 1.0), (1.0, 1.5)], mixing_s)
        for _ in range(BRIEF + FULL + 1):
            _, autos = next(steps)
        assert all(plan(auto).stage is Stage.CHOSEN for auto in autos)
        return [plan(auto).side for auto in autos]

    assert on_all(work) == sides


@pytest.mark.parametrize("times", [(1.0, 3.0), (10.0, 1.0)], ids=["dense", "compressed"])
def test_a_settled_step_sends_what_the_chosen_one_sends_and_measures_nothing(
    times: tuple[float, float],
) -> None:
    def work(comm: Communicator) -> None:
        clock, compressed = Clock(*times), times[0] > times[1]
        auto = clock.start(comm, Auto(Marsit(None), TRIAL))
        alone = (Marsit(None) if compressed else Dense()).start(comm, N)
        go(clock, comm, auto, BRIEF + 1)
        alone.aggregate(gradient(comm.rank, 0, N))
        driver: Any = auto.driver
        driver._watch = driver._channel = None  # any use of them would fail
        for one in (auto, alone):
            one.aggregate(gradient(comm.rank, 1, N))
        costs = [(one.traffic.last.messages, one.traffic.last.bytes_sent) for one in (auto, alone)]
        assert costs[0] == costs[1]
        assert auto.can_undo == alone.can_undo
        if not compressed:
            auto.undo()

    on_all(work)


def test_what_was_decided_holds_in_a_run_that_goes_on_from_its_state_and_a_trial_is_made_anew() -> None:
    def interrupted(comm: Communicator) -> Any:
        clock = Clock(10.0, 1.0)
        first, second = (clock.start(comm, Auto(Marsit(None), TRIAL)) for _ in range(2))
        go(clock, comm, first, 4)
        second.load_state_dict(first.state_dict())
        assert go(clock, comm, second, BRIEF - 4 + 1).stage is Stage.BRIEF
        return go(clock, comm, second, BRIEF).side

    def decided(comm: Communicator) -> None:
        clock = Clock(10.0, 1.0)
        first, second = (clock.start(comm, Auto(Marsit(None), TRIAL)) for _ in range(2))
        go(clock, comm, first, BRIEF + 2)
        second.load_state_dict(first.state_dict())
        for step in range(BRIEF + 2, BRIEF + 12):
            vector = gradient(comm.rank, step, N)
            np.testing.assert_array_equal(clock.step(second, vector), clock.step(first, vector))
        np.testing.assert_equal(second.state_dict(), first.state_dict())

    assert on_all(interrupted) is Side.COMPRESSED
    on_all(decided)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("method", [Marsit(None), DoubleSqueeze()], ids=["marsit", "double-squeeze"])
def test_other_numbers_of_ranks_average_what_was_pending_and_choose_anew(method: Any, ranks: int) -> None:
    def before(comm: Communicator) -> Any:
        clock = Clock(10.0, 1.0)
        auto = clock.start(comm, Auto(method, TRIAL))
        go(clock, comm, auto, BRIEF + 6)
        return auto.state_dict(), auto.state_kinds

    states = run_local(RANKS, before)
    mean = np.zeros(N)
    for state, kinds in states:
        mean += sum(state[key] / {"mean": RANKS, "owner": 1}[kinds[key]] for key in errors(state))
    passed_on = redistribute([state for state, _ in states], ranks, states[0][1])

    def after(comm: Communicator) -> Any:
        auto = Auto(method, TRIAL).start(comm, N)
        auto.load_state_dict(passed_on[comm.rank])
        result = auto.aggregate(np.zeros(N, np.float32))
        assert plan(auto).stage is (Stage.BRIEF if ranks > 1 else Stage.CHOSEN)
        return result

    np.testing.assert_allclose(on_all(after, ranks), mean, atol=1e-5)


def test_the_choice_is_made_anew_after_a_while_or_when_steps_take_another_time() -> None:
    every = 50

    def stages(comm: Communicator, change_at: int) -> list[int]:
        clock = Clock(1.0, 3.0)
        auto = clock.start(comm, Auto(Marsit(None), TRIAL, retry_every=every))
        again = []
        for step in range(5 * every):
            if step == change_at:
                clock.behind_s = 2.0
            if go(clock, comm, auto, 1).stage is Stage.BRIEF and plan(auto).since == step:
                again.append(step)
        return again

    assert on_all(lambda comm: stages(comm, -1)) == [0, every, 2 * every, 4 * every]
    assert on_all(lambda comm: stages(comm, 2 * every + 20)) == [0, every, 2 * every, 3 * every, 4 * every]


def test_a_rank_with_nan_is_skipped_on_either_side_where_the_method_does_it() -> None:
    def work(comm: Communicator) -> int:
        clock = Clock(1.0, 3.0)
        auto = clock.start(comm, Auto(Marsit(None, nonfinite="skip"), TRIAL))
        pending = None
        for step in range(BRIEF + 3):
            vector = gradient(comm.rank, step, N).copy()
            if comm.rank == 1 and step in (1, BRIEF // 2 + 1, BRIEF):
                vector[5] = np.nan
            if step == BRIEF:  # the step that would have left compressing behind
                pending = auto.state_dict()["residual"]
            result = clock.step(auto, vector)
            assert np.any(result) == (step not in (1, BRIEF // 2 + 1, BRIEF))
            if step == BRIEF:
                np.testing.assert_array_equal(auto.state_dict()["residual"], pending)
        assert not np.any(auto.state_dict()["residual"])
        return int(auto.feedback.skipped)

    assert on_all(work) == 3


def test_a_choice_is_told_in_one_line_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Communicator) -> None:
        steps = several(comm, [(0.031, 0.0041), (0.0012, 0.0030)])
        for _ in range(BRIEF + 1):
            next(steps)

    with caplog.at_level(logging.INFO, "mpicomp"):
        run_local(RANKS, work)
    assert [record.getMessage() for record in caplog.records] == [
        "vector 1, 12 kB: dense, 1.2 ms instead of 3 (a step 32.2 ms instead of 7.1)",
    ]


def test_a_choice_of_16_bits_is_told_by_the_name_of_their_type(caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Communicator) -> None:
        clock = Clock(0.030, 0.004)
        go(clock, comm, clock.start(comm, Auto(Dense(wire="bfloat16"), TRIAL)), BRIEF + 1)

    with caplog.at_level(logging.INFO, "mpicomp"):
        run_local(RANKS, work)
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("vector 0, 12 kB: bfloat16, 4 ms instead of 30 ")


def test_auto_is_found_by_name_and_takes_methods_that_estimate_the_mean() -> None:
    assert algorithm("auto") == Auto(Marsit())
    assert algorithm("auto", compressing="scalecom", trial_steps=7) == Auto(ScaleCom(), 7)
    assert (Auto().synchronize, Auto("scalecom").synchronize) == ("updates", "gradients")
    for wrong in (Dense(), Auto(), MajorityVote(), SSDM(), SSDM(scale="norm", momentum=0.5), 3, None):
        with pytest.raises(ValueError, match="compressing must be a method"):
            Auto(wrong)
    with pytest.raises(ValueError, match="trial_steps must be an integer of 2 or more"):
        Auto(trial_steps=1)
    with pytest.raises(ValueError, match="retry_every must be an integer of 1 or more, or None"):
        Auto(retry_every=0)


@pytest.mark.parametrize("wrong", [(0, 3.0), (1, 99.0), (1, 0.5), (2, 2.0)])
def test_a_state_with_a_plan_that_is_none_is_refused(comm: Communicator, wrong: tuple[int, float]) -> None:
    auto = Auto().start(comm, 10)
    state = auto.state_dict()
    state["auto"][wrong[0]] = wrong[1]
    with pytest.raises(ValueError, match=r"^rank 0 of 1, vector 0: this state's auto has no stage"):
        auto.load_state_dict(state)
