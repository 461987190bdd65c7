"""Choice of a side by times, and the times that count for a call and a training step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpicomp.auto.trials import (
    COUNT,
    LOOKS,
    TURNS,
    Front,
    Schedule,
    Side,
    Stage,
    Stopwatch,
    TrialPlace,
    TrialPlan,
    TrialTimes,
    slowest,
)

SCHEDULE = Schedule(20, 5000)
BRIEF, FULL = TrialPlan(Stage.BRIEF, 0), TrialPlan(Stage.FULL, 12, Side.COMPRESSED, 1.0)
D, C, M = Side
NONE = [-1.0] * 3
DENSE = TrialPlace(D, D, 0)


def times(calls: tuple[float, float], *turns: tuple[float, ...]) -> TrialTimes:
    periods = [[*turn, *NONE][:3] for turn in turns]
    return TrialTimes([*calls, -1.0], (periods + [NONE] * TURNS)[:TURNS])


def told(watch: Stopwatch, step: int = 0) -> TrialTimes:
    row = np.zeros(COUNT)
    watch.report(step, row)
    return slowest(row[None])


@pytest.mark.parametrize(
    ("calls", "periods", "stage", "side"),
    [
        ((1.0, 0.1), (1.1, 0.2), Stage.CHOSEN, C),
        ((1.0, 0.1), (1.1, 0.3), Stage.FULL, C),
        ((1e-5, 1e-6), (1e-5, 1e-6), Stage.FULL, C),  # a moment's disturbance lasts longer than such a trial
        ((1.0, 2.0), (5.0, 6.0), Stage.CHOSEN, D),
        ((1.0, 1.1), (1.0, 2.0), Stage.CHOSEN, D),
        ((1.0, 1.1), (5.0, 5.1), Stage.FULL, D),
        ((1.0, 0.96), (5.0, 4.9), Stage.FULL, D),
        ((1.0, 0.1), (1.0, 9.0), Stage.FULL, C),  # other vectors may be to blame, which go the other way in the mixture
    ],
)
def test_a_brief_trial_decides_what_is_beyond_doubt(
    calls: tuple[float, float], periods: tuple[float, float], stage: Stage, side: Side
) -> None:
    found = SCHEDULE.next(BRIEF, 12, times(calls, periods))
    assert (found.stage, found.since, found.side) == (stage, 12, side)


@pytest.mark.parametrize(
    ("periods", "pick", "side"),
    [
        ((1.0, 0.98, 0.98), C, C),
        ((1.0, 0.98, 0.98), D, D),  # this vector's part in the mixture
        ((1.0, 0.995, 0.995), C, D),  # not worth it
        ((1.0, 1.2, 0.9), C, C),
        ((1.0, 0.9, 0.95), D, C),  # the mixture is slower than compressing everything
        ((1.0, 1.2, 1.1), C, D),
    ],
)
def test_a_full_trial_goes_by_the_time_of_training_steps(periods: tuple[float, ...], pick: Side, side: Side) -> None:
    found = SCHEDULE.next(replace(FULL, side=pick), 84, times((1.0, 0.1), *[periods] * TURNS))
    assert (found.stage, found.side) == (Stage.CHOSEN, side)
    assert found.period_s in periods


def test_what_does_not_win_in_each_turn_is_not_chosen() -> None:
    won, lost = (1.0, 0.5, 0.5), (0.8, 0.9, 0.9)
    assert SCHEDULE.next(FULL, 84, times((1.0, 0.1), won, won, won, lost)).side is D
    mixture_lost = (1.0, 0.9, 1.1)
    assert SCHEDULE.next(FULL, 84, times((1.0, 0.1), won, won, mixture_lost, won)).side is C
    assert SCHEDULE.next(FULL, 84, times((1.0, 0.1), won, won, won, won)).side is C


@pytest.mark.parametrize("plan", [BRIEF, FULL], ids=["brief", "full"])
def test_a_trial_of_which_times_are_missing_is_made_again(plan: TrialPlan) -> None:
    complete, incomplete = (1.0, 1.0, 1.0), (1.0, -1.0, 1.0)
    for missing in (times((-1.0, 1.0), *[complete] * TURNS), times((1.0, 1.0), incomplete, *[complete] * 3)):
        assert SCHEDULE.next(plan, 84, missing) == replace(plan, since=84)


def test_a_trial_begins_dense_takes_turns_and_ends_after_as_many_steps_as_it_says() -> None:
    brief = [SCHEDULE.place(BRIEF, step) for step in range(SCHEDULE.end(BRIEF))]
    assert [place.side for place in brief] == [D] * 6 + [C] * 6
    assert [place.measured for place in brief] == [None, *[D] * 5, None, *[C] * 5]
    full = [SCHEDULE.place(FULL, step) for step in range(FULL.since, SCHEDULE.end(FULL))]
    assert [place.measured for place in full[1::7]] == [D, C, M] * 4
    assert [place.turn for place in full[1::7]] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for side in Side:  # periods begin and end with a step of the block
        pairs = zip(full, range(FULL.since + 1, SCHEDULE.end(FULL)), strict=False)
        assert sum(one.measured is side and SCHEDULE.same_block(FULL, step) for one, step in pairs) == 20


def test_a_full_trial_of_short_steps_has_more_of_them() -> None:
    def steps(period_s: float) -> int:
        plan = replace(FULL, period_s=period_s)
        return SCHEDULE.end(plan) - plan.since

    assert [steps(period_s) for period_s in (1.0, 0.004, 0.0039, 0.0019, 1e-5)] == [84, 84, 144, 264, 264]


def test_what_is_chosen_is_looked_at_before_each_multiple_and_examined_at_powers_of_two() -> None:
    plan = TrialPlan(Stage.CHOSEN, 84, C, 2.0)
    assert SCHEDULE.end(plan) == 5000
    assert SCHEDULE.quiet_until(plan) == 5000 - LOOKS - 1
    assert Schedule(20, None).quiet_until(plan) > 1 << 60
    same = times((-1.0, 1.0), (-1.0, 2.1, -1.0))
    stages = [SCHEDULE.next(plan, 5000 * turn, same).stage for turn in range(1, 10)]
    assert [turn for turn, stage in enumerate(stages, 1) if stage is Stage.BRIEF] == [1, 2, 4, 8]
    other = times((-1.0, 1.0), (-1.0, 3.1, -1.0))
    assert SCHEDULE.next(plan, 15_000, other).stage is Stage.BRIEF
    unknown = times((-1.0, 1.0))
    assert SCHEDULE.next(plan, 15_000, unknown) == replace(plan, since=15_000)


def test_calls_in_flight_at_once_share_the_time_in_which_any_was_under_way() -> None:
    front = Front()
    first, second, third = (Stopwatch(front) for _ in range(3))
    for watch, begin in ((first, 0.0), (second, 1.0), (third, 9.0)):
        watch.begin(0, DENSE, True, begin)
    first.end(3.0)
    second.end(4.0)
    third.end(11.0)
    assert [told(watch).calls[D] for watch in (first, second, third)] == [3.0, 1.0, 2.0]


def test_an_evaluation_between_two_steps_sways_nothing() -> None:
    def measured(pauses: dict[int, float]) -> TrialTimes:
        watch, now = Stopwatch(Front()), 0.0
        for step in range(21):
            watch.begin(step, TrialPlace(C, C, 2), True, now)
            watch.end(now + 0.2)
            now += 1.0 + 0.01 * (step % 3) + pauses.get(step, 0.0)
        return told(watch)

    still, disturbed = measured({}), measured({3: 100.0, 11: 30.0})
    assert disturbed.period(C) == pytest.approx(still.period(C), abs=0.011)


def test_a_period_is_between_steps_that_follow_each_other_and_have_not_failed() -> None:
    watch = Stopwatch(Front())
    for step, now in ((0, 0.0), (1, 1.0), (3, 9.0)):
        watch.begin(step, DENSE, True, now)
        watch.end(now)
    watch.begin(4, DENSE, True, 11.0)
    watch.fail()
    watch.begin(5, DENSE, True, 50.0)
    watch.begin(6, DENSE, False, 60.0)  # in another block
    assert watch._periods[0][D] == [1.0, 2.0]


def test_vectors_of_a_training_decide_by_the_period_of_the_first_and_those_of_another_by_their_own() -> None:
    front = Front()
    watches = [Stopwatch(front) for _ in range(3)]
    for watch, period in zip(watches, (1.0, 1.02, 5.0), strict=True):
        for step in range(3):
            watch.begin(step, DENSE, True, period * step)
            watch.end(period * step)
    assert [told(watch, 3).period(D) for watch in watches] == [1.0, 1.0, 5.0]
