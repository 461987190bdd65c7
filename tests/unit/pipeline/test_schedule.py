"""Pipeline schedules: the work of each stage, proved for all stages together."""

from __future__ import annotations

from typing import Any

import pytest

from mpicomp.pipeline import schedule as module
from mpicomp.pipeline.schedule import (
    SCHEDULES,
    Action,
    Backward,
    Forward,
    Schedule,
    ScheduleError,
    gpipe,
    one_forward_one_backward,
    schedule,
)
from mpicomp.pipeline.simulate import Times, all_stages, draw, prove, simulate_time

STAGES, MICRO_BATCHES = range(1, 9), range(1, 18)
BOTH = pytest.mark.parametrize("name", SCHEDULES)


@BOTH
@pytest.mark.parametrize("stages", STAGES)
def test_every_micro_batch_goes_forward_and_backward_and_nobody_waits_for_ever(name: str, stages: int) -> None:
    for micro_batches in MICRO_BATCHES:
        report = prove(all_stages(SCHEDULES[name], stages, micro_batches), micro_batches)
        hops = [(stage > 0) + (stage < stages - 1) for stage in range(stages)]
        assert report.messages == tuple(micro_batches * hop for hop in hops)


@pytest.mark.parametrize("stages", STAGES)
def test_kept_activations_of_a_stage_are_bounded_by_the_stages_behind_it_under_1f1b(stages: int) -> None:
    for micro_batches in MICRO_BATCHES:
        report = prove(all_stages(one_forward_one_backward, stages, micro_batches), micro_batches)
        assert report.alive == tuple(min(stages - stage, micro_batches) for stage in range(stages))


@pytest.mark.parametrize("stages", STAGES)
def test_a_stage_keeps_all_micro_batches_under_gpipe(stages: int) -> None:
    for micro_batches in MICRO_BATCHES:
        assert prove(all_stages(gpipe, stages, micro_batches), micro_batches).alive == (micro_batches,) * stages


@BOTH
@pytest.mark.parametrize("stages", STAGES)
def test_the_bubble_is_that_of_the_formula_where_messages_cost_nothing(name: str, stages: int) -> None:
    for micro_batches in MICRO_BATCHES:
        timeline = simulate_time(all_stages(SCHEDULES[name], stages, micro_batches), Times(1.0, 2.0))
        assert timeline.seconds == 3 * (micro_batches + stages - 1)
        assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@BOTH
def test_micro_batches_go_backward_in_ascending_order_on_every_stage(name: str) -> None:
    for stage in range(5):
        backward = [one.micro_batch for one in SCHEDULES[name](stage, 5, 7) if isinstance(one, Backward)]
        assert backward == list(range(7))


@BOTH
def test_the_drawing_in_the_module_equals_that_of_the_simulator(name: str) -> None:
    assert module.__doc__ is not None
    lines = [line.strip() for line in module.__doc__.splitlines()]
    drawn = draw(all_stages(SCHEDULES[name], 4, 4)).splitlines()
    first = lines.index(drawn[0])
    assert lines[first : first + 4] == drawn


def test_messages_that_take_longer_than_compute_set_the_pace() -> None:
    """F0, 5 messages, F4 and B0 on the other stage, 5 messages, B4."""
    timeline = simulate_time(all_stages(gpipe, 2, 5), Times(1.0, 1.0, forward_wire=10.0, backward_wire=10.0))
    assert timeline.seconds == 1 + 5 * 10 + 1 + 1 + 5 * 10 + 1


def test_a_message_delays_by_its_time_on_each_hop() -> None:
    timeline = simulate_time(all_stages(gpipe, 3, 1), Times(1.0, 2.0, forward_wire=0.5, backward_wire=0.25))
    assert timeline.seconds == 3 * 1 + 2 * 0.5 + 3 * 2 + 2 * 0.25
    assert timeline.busy == (3.0, 3.0, 3.0)


def test_received_and_sent_messages_follow_from_the_action() -> None:
    assert [Forward(0).source(stage, 3) for stage in range(3)] == [None, 0, 1]
    assert [Forward(0).destination(stage, 3) for stage in range(3)] == [1, 2, None]
    assert [Backward(0).source(stage, 3) for stage in range(3)] == [1, 2, None]
    assert [Backward(0).destination(stage, 3) for stage in range(3)] == [None, 0, 1]


F, B = Forward, Backward


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[F(0), B(0)]], "stage 0 leaves out F1, B1"),
        ([[F(0), F(1), B(0), B(0)]], r"stage 0, action 3 \(B0\): it was done before"),
        ([[F(0), B(1), F(1), B(0)]], r"stage 0, action 1 \(B1\): the micro-batch has not gone forward yet"),
        ([[F(0), F(2), B(0), B(2)]], r"stage 0, action 1 \(F2\): there are 2 micro-batches"),
        ([[F(0), F(1), B(0), B(1)], [F(1), F(0), B(0), B(1)]], "stage 1, action 0: it expects the message of F1, but"),
        ([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], "deadlock, for ever wait: stage 0 before action 1 of 4"),
    ],
)
def test_a_wrong_schedule_is_refused_by_stage_and_action(stages: list[list[Action]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        prove(stages, 2)


def test_a_schedule_whose_messages_never_come_has_no_time() -> None:
    with pytest.raises(ScheduleError, match="stage 0 waits for ever before B0"):
        simulate_time([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], Times())


def test_a_wrong_name_is_refused_with_the_list() -> None:
    assert schedule("1f1b") is one_forward_one_backward
    assert schedule(gpipe) is gpipe
    with pytest.raises(ScheduleError, match=r"no schedule '1f1f' \(did you mean '1f1b'\?\): choose one of gpipe, 1f1b"):
        schedule("1f1f")
    wrong: Any = 3
    with pytest.raises(TypeError, match="the schedule is 3: pass a name"):
        schedule(wrong)


@BOTH
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((2, 2, 1), "stage 2 is not one of 2 stages: count them from 0 to 1"),
        ((-1, 2, 1), "stage -1 is not one of 2 stages"),
        ((0, 0, 1), "0 stages and 1 micro-batches make no pipeline"),
        ((0, 1, 0), "1 stages and 0 micro-batches make no pipeline"),
        ((0, 2.0, 1), "stages is 2.0: pass an integer"),
        ((True, 2, 1), "stage is True: pass an integer"),
    ],
)
def test_numbers_that_make_no_pipeline_are_refused(name: str, numbers: Any, message: str) -> None:
    made: Schedule = SCHEDULES[name]
    with pytest.raises(ScheduleError, match=message):
        made(*numbers)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "1", True])
def test_times_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="forward_wire must be a number of seconds"):
        Times(forward_wire=wrong)
