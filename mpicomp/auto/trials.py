"""Which of two ways a vector goes, found out in trials: a function of steps and of times that all ranks know.

    brief    D C                        few steps: enough where one side is far ahead
    full     D C M, four times          `trial_steps` of each, or more of them where steps are short
    chosen   the winner                 until the step is a multiple of `retry_every`

D is dense, C compressed. M is the mixture: each vector goes the way on which its own calls were faster. All vectors
that are started together are in the same trial, so that the periods of D and C are those of uniform training steps.

A vector's own calls tell which way might serve it. Whether that pays is up to the period, the time from step to step:
compressing may win its own call, and still slow down what is computed at the same time. It has to win in each of the
four turns: what disturbs a machine for a while may spoil a turn of one side, but not all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import median
from typing import NamedTuple

SKIPPED = 1  # calls at the beginning of each block: compiling, cold memory, what was pending
BRIEF_PART = 5  # a brief trial has this part of the steps
TURNS = 4  # of a full trial
BLOCK_S, LONGER = 0.02, 4  # a block of a full trial is to last so long, but so many times its usual steps at most
LOOKS = 10  # periods at the end of a chosen stretch
WORTH = 0.01  # of the period: what must be gained
WORTH_CALL = 0.05  # of a call's time
HOPELESS = 2.0  # so many times slower, and compressing is not tried further
CLEAR, CLEAR_S = 5.0, 0.02  # so many times faster, of steps this long: no noise is as large
CHANGED = 1.5  # so many times longer or shorter, and the period is another one
NEVER = 1 << 62


class Side(IntEnum):
    """A way, or the choice of one for each vector."""

    DENSE = 0
    COMPRESSED = 1
    MIXED = 2


class Stage(IntEnum):
    """What a plan is about."""

    BRIEF = 0
    FULL = 1
    CHOSEN = 2


@dataclass(frozen=True)
class Plan:
    """What a vector is to do; the same on all ranks.

    Attributes
    ----------
    stage : Stage
    since : int
        Step at which the stage began.
    side : Side
        DENSE or COMPRESSED: what was chosen; in a full trial, this vector's part in the mixture.
    period_s : float
        Of a training step: when it was chosen, or in a full trial that of dense ones before; below 0: not known.
    """

    stage: Stage
    since: int
    side: Side = Side.DENSE
    period_s: float = -1.0

    def numbers(self) -> list[float]:
        """For a state."""
        return [self.stage, self.since, self.side, self.period_s]

    @classmethod
    def of(cls, numbers: Sequence[float], step: int) -> Plan:
        """Read what `numbers` gave, in a state of a step; ValueError if it is none."""
        stage, since, side, period_s = numbers
        known = stage in tuple(Stage) and side in (Side.DENSE, Side.COMPRESSED)
        if not (known and since == int(since) and 0 <= since <= step):
            raise ValueError("tells no stage, step or side of a trial")
        return cls(Stage(int(stage)), int(since), Side(int(side)), period_s)


class Times(NamedTuple):
    """Seconds of the slowest rank, by side; below 0: not measured."""

    calls: list[float]
    periods: list[list[float]]  # of each turn

    def period(self, side: Side) -> float:
        """Of all turns that there were; below 0: none."""
        return median([turn[side] for turn in self.periods if turn[side] >= 0] or [-1.0])


class Place(NamedTuple):
    """What a step is in its plan."""

    side: Side  # the way to go: DENSE or COMPRESSED
    measured: Side | None  # whose time it is
    turn: int


@dataclass(frozen=True)
class Schedule:
    """How long trials are. Parameters as in `mpicomp.Auto`."""

    trial_steps: int
    retry_every: int | None

    def end(self, plan: Plan) -> int:
        """The step at which times are exchanged, and the next plan is made."""
        if plan.stage is Stage.CHOSEN:
            every = self.retry_every
            return NEVER if every is None else (plan.since // every + 1) * every
        blocks, length = self._blocks(plan)
        return plan.since + len(blocks) * length

    def quiet_until(self, plan: Plan) -> int:
        """The step before which nothing is measured, once the first step of the stage is over; 0 while on trial."""
        return self.end(plan) - LOOKS - 1 if plan.stage is Stage.CHOSEN else 0

    def place(self, plan: Plan, step: int) -> Place:
        """Of a step before the end."""
        if plan.stage is Stage.CHOSEN:
            return Place(plan.side, plan.side if step >= self.quiet_until(plan) else None, 0)
        blocks, length = self._blocks(plan)
        block, place = divmod(step - plan.since, length)
        side = blocks[block]
        way = plan.side if side is Side.MIXED else side
        return Place(way, side if place >= SKIPPED else None, block // len(Side))

    def same_block(self, plan: Plan, step: int) -> bool:
        """Whether the step before is of the same block, so that the period between them is of one side."""
        return plan.stage is Stage.CHOSEN or (step - plan.since) % self._blocks(plan)[1] > 0

    def _blocks(self, plan: Plan) -> tuple[tuple[Side, ...], int]:
        """Sides, and steps of each block: those that measure periods, one more to end the last, and what is skipped."""
        if plan.stage is Stage.BRIEF:
            return (Side.DENSE, Side.COMPRESSED), SKIPPED + math.ceil(self.trial_steps / BRIEF_PART) + 1
        measuring = usual = math.ceil(self.trial_steps / TURNS)
        while measuring < LONGER * usual and measuring * plan.period_s < BLOCK_S:
            measuring *= 2  # so that ranks and vectors come to the same by periods that are nearly the same
        return tuple(Side) * TURNS, SKIPPED + measuring + 1

    # Deciding --------------------------------------------------------------------------------------------------------

    def next(self, plan: Plan, step: int, times: Times) -> Plan:
        """The plan that begins at the end of another one."""
        if plan.stage is Stage.CHOSEN:
            return self._go_on(plan, step, times)
        turns, sides = (1, 2) if plan.stage is Stage.BRIEF else (TURNS, 3)
        if min(min(turn[:sides]) for turn in times.periods[:turns]) < 0 or min(times.calls[:2]) < 0:
            return replace(plan, since=step)  # a run went on from a state, and knows less
        return self._after_brief(step, times) if plan.stage is Stage.BRIEF else self._after_full(plan, step, times)

    def _go_on(self, plan: Plan, step: int, times: Times) -> Plan:
        """Examine anew after 1, 2, 4, ... times `retry_every`, or if a training step is not what it was."""
        assert self.retry_every is not None
        period, turn = times.period(plan.side), step // self.retry_every
        known = period > 0 and plan.period_s > 0
        changed = known and not 1 / CHANGED <= period / plan.period_s <= CHANGED
        if changed or turn & (turn - 1) == 0:
            return Plan(Stage.BRIEF, step)
        return replace(plan, since=step)

    @staticmethod
    def _after_brief(step: int, times: Times) -> Plan:
        dense, compressed = times.period(Side.DENSE), times.period(Side.COMPRESSED)
        dense_s, compressed_s, _ = times.calls
        wins = compressed_s < (1 - WORTH_CALL) * dense_s
        if not wins and (compressed_s >= HOPELESS * dense_s or compressed >= HOPELESS * dense):
            return Plan(Stage.CHOSEN, step, Side.DENSE, dense)
        if wins and dense >= CLEAR * compressed and dense >= CLEAR_S:
            return Plan(Stage.CHOSEN, step, Side.COMPRESSED, compressed)
        return Plan(Stage.FULL, step, Side.COMPRESSED if wins else Side.DENSE, dense)

    @staticmethod
    def _after_full(plan: Plan, step: int, times: Times) -> Plan:
        dense = times.period(Side.DENSE)

        def pays(side: Side) -> bool:
            every_turn = all(turn[side] < turn[Side.DENSE] for turn in times.periods)
            return every_turn and times.period(side) <= (1 - WORTH) * dense

        mixed, compressed = (times.period(side) for side in (Side.MIXED, Side.COMPRESSED))
        if pays(Side.MIXED) and not (pays(Side.COMPRESSED) and mixed > (1 + WORTH) * compressed):
            return Plan(Stage.CHOSEN, step, plan.side, mixed)
        if pays(Side.COMPRESSED):
            return Plan(Stage.CHOSEN, step, Side.COMPRESSED, compressed)
        return Plan(Stage.CHOSEN, step, Side.DENSE, dense)
