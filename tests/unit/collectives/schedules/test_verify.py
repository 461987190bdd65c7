"""The proof fails for every plan that is wrong, and names the place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest

from collectives.schedules.plan import Plan, PlanError, Step, Transfer
from collectives.schedules.registry import TOPOLOGIES
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.verify import PlannedMessage, all_plans, deliveries, prove


def with_steps(plans: list[Plan], rank: int, steps: list[Step]) -> list[Plan]:
    return [replace(plan, steps=tuple(steps)) if plan.rank == rank else plan for plan in plans]


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("size", [4, 5])
def test_a_message_dropped_at_one_end_is_missed(name: str, size: int) -> None:
    plans = all_plans(TOPOLOGIES[name](), size)
    for plan in plans:
        for index, step in enumerate(plan.steps):
            without = [Step(step.sends[1:], step.recvs)] if step.sends and step.sends[1:] + step.recvs else []
            with pytest.raises(PlanError, match=r"rank \d of \d"):
                prove(with_steps(plans, plan.rank, [*plan.steps[:index], *without, *plan.steps[index + 1 :]]))


def changed_at_both_ends(
    plans: list[Plan], message: PlannedMessage, change: Callable[[Transfer, bool], list[Transfer]]
) -> list[Plan]:
    """Return the plans with other transfers in place of those of a message; `change` receives the direction."""
    for rank, index, peer, received in (
        (message.source, message.source_step, message.destination, False),
        (message.destination, message.destination_step, message.source, True),
    ):
        sides = []
        for receives, side in enumerate((plans[rank].steps[index].sends, plans[rank].steps[index].recvs)):
            key = peer, message.chunks, receives
            new = [change(t, received) if key == (t.peer, t.chunks, received) else [t] for t in side]
            sides.append(tuple(chain.from_iterable(new)))
        steps = list(plans[rank].steps)
        steps[index : index + 1] = [Step(*sides)] if any(sides) else []
        plans = with_steps(plans, rank, steps)
    return plans


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_message_dropped_at_both_ends_leaves_a_contribution_out(name: str) -> None:
    plans = all_plans(TOPOLOGIES[name](), 4)
    for message in deliveries(plans):
        with pytest.raises(PlanError, match=r"rank \d of 4"):
            prove(changed_at_both_ends(plans, message, lambda transfer, received: []))


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize(("weight", "held_weight"), [(1, 0), (-1, 0), (0, 1), (0, -1)])
def test_a_wrong_weight_is_found(name: str, weight: int, held_weight: int) -> None:
    """Both ends agree on it: only the content of the message shows the error."""
    plans = all_plans(TOPOLOGIES[name](), 5)
    for message in deliveries(plans):
        new_weight, new_held = message.weight + weight, message.held_weight + held_weight
        if new_weight < 1 or new_held < 0 or new_weight + new_held > 5:
            continue

        def wrong(transfer: Transfer, received: bool, weight: int = new_weight, held: int = new_held) -> list[Transfer]:
            return [replace(transfer, weight=weight, held_weight=held if received else 0)]

        with pytest.raises(PlanError, match=r"rank \d of 5, step \d+, chunk \d+ from rank \d"):
            prove(changed_at_both_ends(plans, message, wrong))


def test_ends_that_disagree_on_a_weight_are_named() -> None:
    plans = all_plans(Ring(), 4)
    first, step, *rest = plans[2].steps
    wrong = Step((replace(step.sends[0], weight=1),), step.recvs)
    with pytest.raises(PlanError, match=r"rank 3 of 4, step 1: expects .* of weight 2 from rank 2, .* of weight 1"):
        prove(with_steps(plans, 2, [first, wrong, *rest]))


def test_swapped_messages_are_named() -> None:
    plans = all_plans(Ring(2), 4)
    first, second, *rest = plans[1].steps
    swapped = [Step(second.sends, first.recvs), Step(first.sends, second.recvs), *rest]
    with pytest.raises(PlanError, match=r"rank 2 of 4, step 0: expects chunks range\(0, 1\).*range\(4, 5\)"):
        prove(with_steps(plans, 1, swapped))


def test_a_contribution_counted_twice_is_named() -> None:
    plans = [
        Plan(0, 3, 1, (Step((Transfer(1, range(1), 1),), ()),) * 2),
        Plan(1, 3, 1, tuple(Step((), (Transfer(0, range(1), 1, held),)) for held in (1, 2))),
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
    plans = []
    for rank in range(3):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        send, recv = Transfer(after, range(rank, rank + 1), 1), Transfer(before, range(before, before + 1), 1, 1)
        plans.append(Plan(rank, 3, 3, (Step((send,), ()), Step((), (recv,)))))
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
