"""Trials that choose between dense and compressed communication: a pure function of step numbers and shared times.

    brief    D C                        few steps, enough if one side is far ahead
    full     D C M, four times          `trial_steps` of each, or more of them if steps are short
    chosen   the winner                 until the step is a multiple of `retry_every`

D is dense, C compressed. M is the mixture: each vector uses the side on which its own calls were faster. All vectors
that are started together are in the same trial, so that the periods of D and C are those of uniform training steps.

The times of a vector's own calls select its candidate. The period, the time from step to step, decides if the candidate
pays: compressing may shorten its own call, and still slow down computations that run at the same time. It has to win in
each of the four turns, since a temporary disturbance of the machine may spoil one turn of a side, but not all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import median
from typing import NamedTuple

import numpy as np

from collectives.annotations import Doubles

SKIPPED = 1  # unmeasured calls at the start of each block: compiling, cold memory, pending errors
BRIEF_PART = 5  # a full trial measures this many times the steps of a brief one
TURNS = 4  # turns of a full trial
BLOCK_S, LONGER = 0.02, 4  # desired seconds of a block in a full trial; at most so many times its usual steps
LOOKS = 10  # measured periods at the end of a chosen stretch
WORTH = 0.01  # required gain, as a part of the period
WORTH_CALL = 0.05  # required gain, as a part of a call's time
HOPELESS = 2.0  # factor of slowness at which compressing is not tried further
CLEAR, CLEAR_S = 5.0, 0.02  # gain beyond any noise: this factor, for steps of at least this many seconds
CHANGED = 1.5  # factor of longer or shorter periods that starts new trials
NEVER = 1 << 62
ALIKE = 0.1  # relative difference up to which periods belong to the same training step


class Side(IntEnum):
    """Side of a trial: one way to communicate, or a mixture of both."""

    DENSE = 0
    COMPRESSED = 1
    MIXED = 2


COUNT = len(Side) * (1 + TURNS)  # numbers that ranks exchange


class Stage(IntEnum):
    """Stage of a plan."""

    BRIEF = 0
    FULL = 1
    CHOSEN = 2


@dataclass(frozen=True)
class TrialPlan:
    """Plan of a vector's next steps; equal on all ranks."""

    stage: Stage
    since: int  # step at which the stage began
    side: Side = Side.DENSE  # DENSE or COMPRESSED: the chosen side; in a full trial, this vector's side in the mixture
    # seconds per training step at the choice, or in a full trial of the dense steps before; below 0: not known
    period_s: float = -1.0

    def numbers(self) -> list[float]:
        """Return the numbers that represent the plan in a state."""
        return [self.stage, self.since, self.side, self.period_s]

    @classmethod
    def of(cls, numbers: Sequence[float], step: int) -> TrialPlan:
        """Return the plan of such numbers in a state of a step; raise ValueError if they are invalid."""
        stage, since, side, period_s = numbers
        known = stage in tuple(Stage) and side in (Side.DENSE, Side.COMPRESSED)
        if not (known and since == int(since) and 0 <= since <= step):
            raise ValueError("has no stage, step or side of a trial")
        return cls(Stage(int(stage)), int(since), Side(int(side)), period_s)


class TrialTimes(NamedTuple):
    """Seconds of the slowest rank, by side; below 0: not measured."""

    calls: list[float]
    periods: list[list[float]]  # turn by turn

    def period(self, side: Side) -> float:
        """Return the median over turns; below 0 if no turn was measured."""
        return median([turn[side] for turn in self.periods if turn[side] >= 0] or [-1.0])


class TrialPlace(NamedTuple):
    """Role of a step in its plan."""

    side: Side  # DENSE or COMPRESSED: the driver that makes the step
    measured: Side | None  # the side for which its time counts
    turn: int


@dataclass(frozen=True)
class Schedule:
    """Lengths of trials, and the choice after them. Parameters as in `mpicomp.Auto`."""

    trial_steps: int
    retry_every: int | None

    def end(self, plan: TrialPlan) -> int:
        """Return the step at which ranks exchange times and make the next plan."""
        if plan.stage is Stage.CHOSEN:
            every = self.retry_every
            return NEVER if every is None else (plan.since // every + 1) * every
        blocks, length = self._blocks(plan)
        return plan.since + len(blocks) * length

    def quiet_until(self, plan: TrialPlan) -> int:
        """Return the step before which a chosen side runs unmeasured after its first step; 0 while on trial."""
        return self.end(plan) - LOOKS - 1 if plan.stage is Stage.CHOSEN else 0

    def place(self, plan: TrialPlan, step: int) -> TrialPlace:
        """Return the role of a step before the end."""
        if plan.stage is Stage.CHOSEN:
            return TrialPlace(plan.side, plan.side if step >= self.quiet_until(plan) else None, 0)
        blocks, length = self._blocks(plan)
        block, place = divmod(step - plan.since, length)
        side = blocks[block]
        way = plan.side if side is Side.MIXED else side
        return TrialPlace(way, side if place >= SKIPPED else None, block // len(Side))

    def same_block(self, plan: TrialPlan, step: int) -> bool:
        """Return True if the step before is of the same block, so that the period between them is of one side."""
        return plan.stage is Stage.CHOSEN or (step - plan.since) % self._blocks(plan)[1] > 0

    def _blocks(self, plan: TrialPlan) -> tuple[tuple[Side, ...], int]:
        """Return the sides, and the steps of a block: skipped, measured, and one that ends the last period."""
        if plan.stage is Stage.BRIEF:
            return (Side.DENSE, Side.COMPRESSED), SKIPPED + math.ceil(self.trial_steps / BRIEF_PART) + 1
        measuring = usual = math.ceil(self.trial_steps / TURNS)
        while measuring < LONGER * usual and measuring * plan.period_s < BLOCK_S:
            # doubling makes ranks and vectors with nearly equal periods choose equal lengths
            measuring *= 2
        return tuple(Side) * TURNS, SKIPPED + measuring + 1

    # Deciding --------------------------------------------------------------------------------------------------------

    def next(self, plan: TrialPlan, step: int, times: TrialTimes) -> TrialPlan:
        """Return the plan that begins at the end of another one."""
        if plan.stage is Stage.CHOSEN:
            return self._go_on(plan, step, times)
        turns, sides = (1, 2) if plan.stage is Stage.BRIEF else (TURNS, 3)
        if min(min(turn[:sides]) for turn in times.periods[:turns]) < 0 or min(times.calls[:2]) < 0:
            return replace(plan, since=step)  # times are missing after a restart from a state: repeat the trial
        return self._after_brief(step, times) if plan.stage is Stage.BRIEF else self._after_full(plan, step, times)

    def _go_on(self, plan: TrialPlan, step: int, times: TrialTimes) -> TrialPlan:
        """Return a new trial after 1, 2, 4, ... times `retry_every` or if the period has changed, else go on."""
        assert self.retry_every is not None
        period, turn = times.period(plan.side), step // self.retry_every
        known = period > 0 and plan.period_s > 0
        changed = known and not 1 / CHANGED <= period / plan.period_s <= CHANGED
        if changed or turn & (turn - 1) == 0:
            return TrialPlan(Stage.BRIEF, step)
        return replace(plan, since=step)

    @staticmethod
    def _after_brief(step: int, times: TrialTimes) -> TrialPlan:
        dense, compressed = times.period(Side.DENSE), times.period(Side.COMPRESSED)
        dense_s, compressed_s, _ = times.calls
        wins = compressed_s < (1 - WORTH_CALL) * dense_s
        if not wins and (compressed_s >= HOPELESS * dense_s or compressed >= HOPELESS * dense):
            return TrialPlan(Stage.CHOSEN, step, Side.DENSE, dense)
        if wins and dense >= CLEAR * compressed and dense >= CLEAR_S:
            return TrialPlan(Stage.CHOSEN, step, Side.COMPRESSED, compressed)
        return TrialPlan(Stage.FULL, step, Side.COMPRESSED if wins else Side.DENSE, dense)

    @staticmethod
    def _after_full(plan: TrialPlan, step: int, times: TrialTimes) -> TrialPlan:
        dense = times.period(Side.DENSE)

        def pays(side: Side) -> bool:
            every_turn = all(turn[side] < turn[Side.DENSE] for turn in times.periods)
            return every_turn and times.period(side) <= (1 - WORTH) * dense

        mixed, compressed = (times.period(side) for side in (Side.MIXED, Side.COMPRESSED))
        if pays(Side.MIXED) and not (pays(Side.COMPRESSED) and mixed > (1 + WORTH) * compressed):
            return TrialPlan(Stage.CHOSEN, step, plan.side, mixed)
        if pays(Side.COMPRESSED):
            return TrialPlan(Stage.CHOSEN, step, Side.COMPRESSED, compressed)
        return TrialPlan(Stage.CHOSEN, step, Side.DENSE, dense)


# Times, as measured by one rank ---------------------------------------------------------------------------------------


class Front:
    """Measurements that all vectors of a communicator share on a rank."""

    def __init__(self) -> None:
        self.ended_s = -math.inf  # time at which the last measured call of these vectors ended
        self._step = -1
        self._periods: Doubles | None = None

    def common(self, step: int, periods: Doubles) -> Doubles:
        """Return the periods of the first vector in this training step, so that all vectors decide by the same ones.

        Returns `periods` if they belong to another training: two optimizers may use the same step numbers.
        """
        known = self._periods
        if self._step != step or known is None or not np.allclose(periods[0], known[0], rtol=ALIKE, atol=0):
            self._step, self._periods = step, periods
            return periods
        return known


class Stopwatch:
    """Times of one vector, by side.

    A call counts from its beginning or from the previous end of a call, whichever is later: the sum over calls in
    flight at once is the time in which any call was under way. A call begins once the ranks have agreed on it, so the
    wait for late ranks does not count.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self.clear()

    def clear(self) -> None:
        """Forget all times."""
        self._calls: list[list[float]] = [[] for _ in Side]
        self._periods: list[list[list[float]]] = [[[] for _ in Side] for _ in range(TURNS)]
        self._last: tuple[int, TrialPlace | None, float] = (-1, None, 0.0)

    def begin(self, step: int, place: TrialPlace, same_block: bool, now: float) -> None:
        """Start the time of a call; its place decides the side for which the call counts, if any."""
        before, last, began = self._last
        if same_block and last is not None and last.measured is not None and before == step - 1:
            self._periods[last.turn][last.measured].append(now - began)
        self._last = (step, place, now)

    def end(self, now: float) -> None:
        """Record the time of the call, which has ended."""
        _, place, began = self._last
        if place is not None and place.measured is not None:
            self._calls[place.measured].append(now - max(began, min(now, self._front.ended_s)))
        self._front.ended_s = now

    def fail(self) -> None:
        """Discard the time and the period of the call, which has failed."""
        self._last = (-1, None, 0.0)

    def report(self, step: int, row: Doubles) -> None:
        """Write this rank's report: the medians of calls, and of the periods of each turn."""
        own = np.array([[_median(times) for times in turn] for turn in self._periods])
        row[: len(Side)] = [_median(times) for times in self._calls]
        row[len(Side) :] = self._front.common(step, own).ravel()


def slowest(rows: Doubles) -> TrialTimes:
    """Return the times of the slowest rank, from the reports of all ranks."""
    calls, *periods = rows.max(axis=0).reshape(-1, len(Side)).tolist()
    return TrialTimes(calls, periods)


def _median(times: list[float]) -> float:
    return float(np.median(times)) if times else -1.0
