"""Simulation of all stages of a pipeline: a proof that their actions train a batch, and the time that they take."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from mpicomp.pipeline.schedule import Action, Backward, Forward, Schedule, ScheduleError

Actions = Sequence[Action]


@dataclass(frozen=True, slots=True)
class ScheduleProof:
    """Result of `prove`, with a number for each stage.

    Parameters
    ----------
    alive : tuple of int
        The most micro-batches whose activations the stage keeps at a time.
    messages : tuple of int
        Messages that the stage sends.

    Examples
    --------
    >>> from mpicomp.pipeline import gpipe
    >>> from mpicomp.pipeline.simulate import all_stages, prove
    >>> prove(all_stages(gpipe, stages=2, micro_batches=3), 3)
    ScheduleProof(alive=(3, 3), messages=(3, 3))
    """

    alive: tuple[int, ...]
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a micro-batch takes on a stage and on a hop.

    Parameters
    ----------
    forward, backward : float
        On each stage.
    forward_wire, backward_wire : float
        On each hop: activations to the next stage, their gradients to the one before. The two directions do not slow
        each other; messages of one direction follow each other.

    Raises
    ------
    ValueError
        A number is negative or not finite.

    Examples
    --------
    >>> from mpicomp.pipeline.simulate import Times
    >>> Times(forward=1.0, backward=2.0, forward_wire=0.5).backward_wire
    0.0
    """

    forward: float = 1.0
    backward: float = 1.0
    forward_wire: float = 0.0
    backward_wire: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "forward_wire", "backward_wire"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
                raise ValueError(f"{name} must be a number of seconds, 0 or more, not {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of all actions of a pipeline, which `simulate_time` returns.

    Parameters
    ----------
    seconds : float
        Seconds until the last stage has ended.
    busy : tuple of float
        Seconds in which each stage computes.
    starts : tuple of tuples of float
        Seconds at which each of a stage's actions begins.

    Examples
    --------
    >>> from mpicomp.pipeline import gpipe
    >>> from mpicomp.pipeline.simulate import Times, all_stages, simulate_time
    >>> timeline = simulate_time(all_stages(gpipe, stages=2, micro_batches=2), Times())
    >>> timeline.seconds, timeline.busy, timeline.starts[1], round(timeline.bubble, 3)
    (6.0, (4.0, 4.0), (1.0, 2.0, 3.0, 4.0), 0.333)
    """

    seconds: float
    busy: tuple[float, ...]
    starts: tuple[tuple[float, ...], ...]

    @property
    def bubble(self) -> float:
        """Idle part of all stages' time, from 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def all_stages(schedule: Schedule, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    """Return every stage's actions, in order of the stages.

    Parameters
    ----------
    schedule : Schedule
    stages, micro_batches : int

    Returns
    -------
    list of tuples of Action

    Examples
    --------
    >>> from mpicomp.pipeline import SCHEDULES
    >>> from mpicomp.pipeline.simulate import all_stages
    >>> [len(actions) for actions in all_stages(SCHEDULES["1f1b"], stages=3, micro_batches=4)]
    [8, 8, 8]
    """
    return [schedule(stage, stages, micro_batches) for stage in range(stages)]


def prove(stages: Sequence[Actions], micro_batches: int) -> ScheduleProof:
    """Show that the stages' actions take every micro-batch forward once and then backward once, and never deadlock.

    The stages walk their actions with rendezvous sends and no buffers: the send of an action and the receive of the
    next one are posted together, and the next action begins when both are complete. A runtime that lets a stage run on
    while it sends can only do better.

    Parameters
    ----------
    stages : sequence of sequence of Action
        As from `all_stages`.
    micro_batches : int

    Returns
    -------
    ScheduleProof

    Raises
    ------
    ScheduleError
        A micro-batch is left out, taken twice, or goes backward before forward; two neighbours take messages in
        different orders; or stages wait for each other. Names stage and action.

    Examples
    --------
    >>> from mpicomp.pipeline import SCHEDULES
    >>> from mpicomp.pipeline.simulate import all_stages, prove
    >>> [prove(all_stages(SCHEDULES[name], 3, 4), 4).alive for name in ("gpipe", "1f1b")]
    [(4, 4, 4), (3, 2, 1)]
    """
    alive = tuple(_most_alive(stage, actions, micro_batches) for stage, actions in enumerate(stages))
    return ScheduleProof(alive, _walk(stages))


def _most_alive(stage: int, actions: Actions, micro_batches: int) -> int:
    forward: set[int] = set()
    backward: set[int] = set()
    most = 0
    for place, action in enumerate(actions):
        here = f"stage {stage}, action {place} ({action})"
        done = forward if isinstance(action, Forward) else backward
        if not 0 <= action.micro_batch < micro_batches:
            raise ScheduleError(f"{here}: there are {micro_batches} micro-batches, numbered from 0")
        if action.micro_batch in done:
            raise ScheduleError(f"{here}: it was done before")
        if done is backward and action.micro_batch not in forward:
            raise ScheduleError(f"{here}: the micro-batch has not gone forward yet")
        done.add(action.micro_batch)
        most = max(most, len(forward) - len(backward))
    missing = [
        str(kind(one))
        for kind, done in ((Forward, forward), (Backward, backward))
        for one in range(micro_batches)
        if one not in done
    ]
    if missing:
        raise ScheduleError(f"stage {stage} leaves out {', '.join(missing[:10])}")
    return most


def _walk(stages: Sequence[Actions]) -> tuple[int, ...]:
    """Run the rendezvous to its end; return the number of messages that each stage has sent."""
    size = len(stages)
    # Posted sends and receives by (source, destination), and their number per stage.
    sends: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    receives: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    waiting, place, sent = [0] * size, [-1] * size, [0] * size
    free = deque(range(size))
    while free:
        stage = free.popleft()
        actions = stages[stage]
        place[stage] += 1
        pairs = []
        if place[stage] > 0:
            before = actions[place[stage] - 1]
            peer = before.destination(stage, size)
            if peer is not None:
                sends[stage, peer].append(before)
                pairs.append((stage, peer))
        if place[stage] < len(actions):
            peer = actions[place[stage]].source(stage, size)
            if peer is not None:
                receives[peer, stage].append(actions[place[stage]])
                pairs.append((peer, stage))
        waiting[stage] = len(pairs)
        if not pairs and place[stage] < len(actions):
            free.append(stage)
        for source, destination in pairs:
            if not sends[source, destination] or not receives[source, destination]:
                continue
            given, taken = sends[source, destination].popleft(), receives[source, destination].popleft()
            if given != taken:
                raise ScheduleError(
                    f"stage {destination}, action {place[destination]}: it expects the message of {taken}, but stage "
                    f"{source} sends that of its {given}"
                )
            sent[source] += 1
            for end in (source, destination):
                waiting[end] -= 1
                if not waiting[end] and place[end] < len(stages[end]):
                    free.append(end)
    stuck = [stage for stage in range(size) if waiting[stage]]
    if stuck:
        where = ", ".join(f"stage {stage} before action {place[stage]} of {len(stages[stage])}" for stage in stuck)
        raise ScheduleError(f"deadlock, for ever wait: {where}")
    return tuple(sent)


def simulate_time(stages: Sequence[Actions], times: Times) -> Timeline:
    """Return the times of all actions if messages travel while stages compute, and receives are posted ahead.

    Parameters
    ----------
    stages : sequence of sequence of Action
        As from `all_stages`.
    times : Times

    Returns
    -------
    Timeline

    Raises
    ------
    ScheduleError
        Stages wait for messages that no stage sends.

    Examples
    --------
    >>> from mpicomp.pipeline import SCHEDULES
    >>> from mpicomp.pipeline.simulate import Times, all_stages, simulate_time
    >>> timeline = simulate_time(all_stages(SCHEDULES["1f1b"], 4, 12), Times(forward=1.0, backward=2.0))
    >>> timeline.seconds, round(timeline.bubble, 3)
    (45.0, 0.2)
    """
    size = len(stages)
    arrived: dict[tuple[int, Action], float] = {}
    link_free: defaultdict[tuple[int, int], float] = defaultdict(float)
    now, busy = [0.0] * size, [0.0] * size
    starts: list[list[float]] = [[] for _ in stages]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(stages):
            for action in actions[len(starts[stage]) :]:
                peer = action.source(stage, size)
                if peer is not None and (stage, action) not in arrived:
                    break
                begin = max(now[stage], arrived.get((stage, action), 0.0))
                is_forward = isinstance(action, Forward)
                compute = times.forward if is_forward else times.backward
                wire = times.forward_wire if is_forward else times.backward_wire
                starts[stage].append(begin)
                busy[stage] += compute
                now[stage] = begin + compute
                peer = action.destination(stage, size)
                if peer is not None:
                    link_free[stage, peer] = max(now[stage], link_free[stage, peer]) + wire
                    arrived[peer, action] = link_free[stage, peer]
                moved = True
    for stage, actions in enumerate(stages):
        if len(starts[stage]) < len(actions):
            raise ScheduleError(f"stage {stage} waits for ever before {actions[len(starts[stage])]}")
    return Timeline(max(now, default=0.0), tuple(busy), tuple(map(tuple, starts)))


def draw(stages: Sequence[Actions]) -> str:
    """Draw the stages' actions in columns, as if each action took the same time and messages none.

    Parameters
    ----------
    stages : sequence of sequence of Action
        As from `all_stages`.

    Returns
    -------
    str
        A line per stage.

    Raises
    ------
    ScheduleError
        Stages wait for messages that no stage sends.

    Examples
    --------
    >>> from mpicomp.pipeline import SCHEDULES
    >>> from mpicomp.pipeline.simulate import all_stages, draw
    >>> print(draw(all_stages(SCHEDULES["1f1b"], 2, 3)))
    stage 0  F0 F1 .. B0 F2 B1 .. B2
    stage 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    timeline = simulate_time(stages, Times())
    lines = []
    for stage, (actions, starts) in enumerate(zip(stages, timeline.starts, strict=True)):
        cells = [".."] * round(timeline.seconds)
        for action, start in zip(actions, starts, strict=True):
            cells[round(start)] = str(action)
        lines.append(f"stage {stage}  {' '.join(cells)}")
    return "\n".join(lines)
