"""The proof fails for every plan that is wrong, and says where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collectives.schedules.plan import Plan, PlanError, Step, Transfer
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.verify import all_plans, deliveries, prove


def with_steps(plans: list[Plan], rank: int, steps: list[Step]) -> list[Plan]:
    return [replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in plans]


def with_step(plans: list[Plan], rank: int, index: int, step: Step) -> list[Plan]:
    steps = list(plans[rank].steps)
    steps[index] = step
    return with_steps(plans, rank, steps)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("size", [4, 5])
def test_a_message_dropped_at_one_end_is_missed(name: str, size: int) -> None:
    plans = all_plans(TOPOLOGIES[name](), size)
    for plan in plans:
        for index, step in enumerate(plan.steps):
            without = [Step(step.sends[1:], step.recvs)] if step.sends and step.sends[1:] + step.recvs else []
            with pytest.raises(PlanError, match=r"rank \d of \d"):
                prove(with_steps(plans, plan.rank, [*plan.steps[:index], *without, *plan.steps[index + 1 :]]))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_message_dropped_at_both_ends_leaves_a_contribution_out(name: str) -> None:
    plans = all_plans(TOPOLOGIES[name](), 4)
    for message in deliveries(plans):
        mutants = list(plans)
        for rank, index, peer in (
            (message.source, message.source_step, message.destination),
            (message.destination, message.destination_step, message.source),
        ):
            steps = list(mutants[rank].steps)
            step = steps[index]
            key = (peer, message.chunks)
            sends = tuple(t for t in step.sends if rank != message.source or (t.peer, t.chunks) != key)
            recvs = tuple(t for t in step.recvs if rank != message.destination or (t.peer, t.chunks) != key)
            steps[index : index + 1] = [Step(sends, recvs)] if sends or recvs else []
            mutants = with_steps(mutants, rank, steps)
        with pytest.raises(PlanError, match=r"rank \d of 4"):
            prove(mutants)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(("weight", "held_weight"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_wrong_weight_is_found(name: str, weight: int, held_weight: int) -> None:
    plans = all_plans(TOPOLOGIES[name](), 5)
    for message in deliveries(plans):
        new_weight, new_held = message.weight + weight, message.held_weight + held_weight
        if new_weight < 1 or new_held < 0 or new_weight + new_held > 5:
            continue
        mutants = plans
        # Both ends agree on the wrong weight: only what the message really carries can tell.
        for rank, index, peer in (
            (message.source, message.source_step, message.destination),
            (message.destination, message.destination_step, message.source),
        ):
            step = mutants[rank].steps[index]
            sends, recvs = (
                tuple(
                    Transfer(t.peer, t.chunks, new_weight, held)
                    if (t.peer, t.chunks, rank) == (peer, message.chunks, end)
                    else t
                    for t in side
                )
                for side, held, end in ((step.sends, 0, message.source), (step.recvs, new_held, message.destination))
            )
            mutants = with_step(mutants, rank, index, Step(sends, recvs))
        with pytest.raises(PlanError, match=r"rank \d of 5, step \d+, chunk \d+ from rank \d"):
            prove(mutants)


def test_ends_that_disagree_on_a_weight_are_named() -> None:
    plans = all_plans(Ring(), 4)
    step = plans[2].steps[1]
    wrong = Step((replace(step.sends[0], weight=1),), step.recvs)
    with pytest.raises(PlanError, match=r"rank 3 of 4, step 1: expects .* of weight 2 from rank 2, .* of weight 1"):
        prove(with_step(plans, 2, 1, wrong))


def test_swapped_messages_are_named() -> None:
    plans = all_plans(Ring(2), 4)
    first, second, *rest = plans[1].steps
    swapped = [Step(second.sends, first.recvs), Step(first.sends, second.recvs), *rest]
    with pytest.raises(PlanError, match=r"rank 2 of 4, step 0: expects chunks range\(0, 1\).*range\(4, 5\)"):
        prove(with_steps(plans, 1, swapped))


def test_a_contribution_counted_twice_is_named() -> None:
    mine = Transfer(0, range(1), 1)
    meet = Transfer(0, range(1), 1, 1)
    again = Transfer(0, range(1), 1, 2)
    plans = [
        Plan(0, 3, 1, (Step((replace(mine, peer=1),), ()), Step((replace(mine, peer=1),), ()))),
        Plan(1, 3, 1, (Step((), (replace(meet, peer=0),)), Step((), (replace(again, peer=0),)))),
        Plan(2, 3, 1, ()),
    ]
    with pytest.raises(PlanError, match=r"rank 1 of 3, step 1, chunk 0 from rank 0: .* ranks \[0\] twice"):
        prove(plans)


def test_an_overwritten_contribution_is_named() -> None:
    plans = [
        Plan(0, 2, 1, (Step((Transfer(1, range(1), 1),), ()),)),
        Plan(1, 2, 1, (Step((), (Transfer(0, range(1), 1),)),)),
    ]
    with pytest.raises(PlanError, match=r"rank 1 of 2, step 0, chunk 0 .* loses the contributions of ranks \[1\]"):
        prove(plans)


def test_an_incomplete_chunk_is_named() -> None:
    plans = all_plans(Star(segments=1), 3)
    plans = with_steps(plans, 0, [*plans[0].steps[:-1]])
    plans = with_steps(plans, 2, [*plans[2].steps[:-1]])
    with pytest.raises(PlanError, match=r"rank 2 of 3, .* chunk 0 lacks the contributions of ranks \[0, 1\]"):
        prove(plans)


def test_a_circular_wait_is_a_deadlock() -> None:
    """Each of three ranks sends before it receives: fine with buffers, stuck with rendezvous sends."""
    plans = [
        Plan(
            rank,
            3,
            3,
            (
                Step((Transfer((rank + 1) % 3, range(rank, rank + 1), 1),), ()),
                Step((), (Transfer((rank - 1) % 3, range((rank - 1) % 3, (rank - 1) % 3 + 1), 1, 1),)),
            ),
        )
        for rank in range(3)
    ]
    with pytest.raises(PlanError, match=r"rank 0 of 3, step 0: deadlock, it waits to send .* but rank 1 is in step 0"):
        prove(plans)


def test_waiting_for_a_rank_that_has_finished_is_a_deadlock() -> None:
    plans = [Plan(0, 2, 1, (Step((), (Transfer(1, range(1), 1, 1),)),)), Plan(1, 2, 1, ())]
    with pytest.raises(PlanError, match=r"rank 0 of 2, step 0: deadlock, it waits to receive .* rank 1 has finished"):
        prove(plans)


@pytest.mark.parametrize("which", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_plans_of_different_sets_are_refused(which: tuple[int, int]) -> None:
    mixed = [all_plans(Ring(1 + n), 2)[rank] for rank, n in enumerate(which)]
    if which[0] == which[1]:
        prove(mixed)
        mixed.reverse()
    with pytest.raises(PlanError, match="one plan a rank"):
        prove(mixed)
