"""Schedules: lists of faults that a seed determines, and that can be written on a command line."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from apps.faults.fault import KILLS, Fault, Kind, Phase

STOP_S, SLOW_S, LATE_S = (0.05, 0.5), (0.01, 0.2), (0.001, 0.06)
_IN_A_STEP = tuple(phase for phase in Phase if phase is not Phase.CHECKPOINT)


def random_faults(
    seed: int,
    ranks: int,
    steps: int,
    kinds: Sequence[Kind | str] = (Kind.KILL,),
    mean_steps_between: float = 5.0,
    phases: Sequence[Phase | str] = _IN_A_STEP,
) -> tuple[Fault, ...]:
    """Return faults at random places, the same for the same arguments.

    The steps between two faults are geometrically distributed, 0 included: several ranks can fail in one step. At least
    one rank is never killed, and a rank has no fault after its death.

    Parameters
    ----------
    seed, ranks, steps : int
    kinds : sequence of Kind
        Equally likely.
    mean_steps_between : float
        Above 0.
    phases : sequence of Phase
        Equally likely; the disk is full in checkpoints alone.

    Raises
    ------
    ValueError
        There is no rank, kind or phase to choose from, or no time between faults.

    Examples
    --------
    >>> from apps.faults import random_faults, write_schedule
    >>> write_schedule(random_faults(seed=3, ranks=4, steps=12))
    'kill:3:5:before-barrier'
    """
    if ranks < 1 or not kinds or not phases or not mean_steps_between > 0:
        raise ValueError(
            "random faults need a rank, a kind and a phase, and a mean above 0 of the steps between: "
            f"got {ranks} ranks, {len(kinds)} kinds, {len(phases)} phases, {mean_steps_between} steps"
        )
    draw, living, faults = random.Random(seed), list(range(ranks)), list[Fault]()
    step, odds = 0, 1 / (1 + mean_steps_between)
    while True:
        while draw.random() >= odds:
            step += 1
            if step >= steps:
                return tuple(faults)
        kind = Kind(draw.choice(list(kinds)))
        if kind in KILLS and len(living) == 1:
            if all(Kind(one) in KILLS for one in kinds):
                return tuple(faults)
            continue
        rank, phase = draw.choice(living), Phase(draw.choice(list(phases)))
        if kind in KILLS:
            living.remove(rank)
        faults.append(draw_fault(draw, kind, rank, step, phase))


def draw_fault(draw: random.Random, kind: Kind, rank: int, step: int, phase: Phase) -> Fault:
    """Return a fault whose duration or bit is drawn."""
    if kind is Kind.LATE_KILL:
        return Fault(kind, rank, step, phase, seconds=round(draw.uniform(*LATE_S), 4))
    if kind is Kind.STOP:
        return Fault(kind, rank, step, phase, seconds=round(draw.uniform(*STOP_S), 3))
    if kind is Kind.SLOW:
        return Fault(kind, rank, step, phase, seconds=round(draw.uniform(*SLOW_S), 3))
    if kind is Kind.CORRUPT:
        return Fault(kind, rank, step, phase, bit=draw.randrange(1 << 20))
    return Fault(kind, rank, step, Phase.CHECKPOINT if kind is Kind.DISK_FULL else phase)


def write_schedule(faults: Iterable[Fault]) -> str:
    """Return a schedule as one word of a command line."""
    return ",".join(map(str, faults))


def parse_schedule(text: str) -> tuple[Fault, ...]:
    """Return the schedule that `write_schedule` has written; ValueError names the fault that cannot be read."""
    return tuple(Fault.parse(one) for one in text.split(",") if one.strip())
