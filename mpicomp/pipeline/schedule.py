"""Pipeline schedules as data: which micro-batch a stage takes next, forward or backward.

A schedule is a pure function of (stage, stages, micro-batches). It has no MPI and no tensors. The neighbours that
a stage receives from before an action and sends to after it follow from the action: see `source` and `destination`.
`mpicomp.pipeline.simulate` proves a schedule for all stages together, and gives its time on a model.

GPipe, 4 stages and 4 micro-batches: all of them forward, then all of them backward. Every stage keeps the activations
of all micro-batches (Huang et al., "GPipe", NeurIPS 2019). F2 is micro-batch 2 forward, B2 is the same backward::

    stage 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
    stage 1  .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 ..
    stage 2  .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 .. ..
    stage 3  .. .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. ..

One forward, one backward (1F1B), the same: after a warm-up every forward is followed by a backward, so that a stage
keeps the activations of at most stages - stage micro-batches (Narayanan et al., "PipeDream", SOSP 2019)::

    stage 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
    stage 1  .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
    stage 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
    stage 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

Both take the same time where messages cost no time, and leave (K - 1) / (m + K - 1) of it empty for K stages and m
micro-batches. In both, micro-batches go backward in ascending order, so that gradients are summed in one order and are
the same to the bit under either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import ClassVar

from collectives.quoting import suggestion


class ScheduleError(ValueError):
    """A schedule cannot be made of these numbers, or its stages do not train every micro-batch.

    Examples
    --------
    >>> from mpicomp.pipeline import gpipe
    >>> gpipe(stage=4, stages=4, micro_batches=8)
    Traceback (most recent call last):
        ...
    mpicomp.pipeline.schedule.ScheduleError: stage 4 is not one of 4 stages: count them from 0 to 3
    """


@dataclass(frozen=True, slots=True)
class _OfMicroBatch:
    """Action of a stage on one micro-batch."""

    micro_batch: int
    _letter: ClassVar[str]
    _way: ClassVar[int]  # to the next stage that takes the micro-batch

    def source(self, stage: int, stages: int) -> int | None:
        """Return the stage from which `stage`, one of `stages`, receives; None: the way begins here."""
        neighbour = stage - self._way
        return neighbour if 0 <= neighbour < stages else None

    def destination(self, stage: int, stages: int) -> int | None:
        """Return the stage to which `stage`, one of `stages`, sends; None: the way ends here."""
        neighbour = stage + self._way
        return neighbour if 0 <= neighbour < stages else None

    def __str__(self) -> str:
        return f"{self._letter}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Forward(_OfMicroBatch):
    """Run a micro-batch through the stage, and keep its graph for the backward; activations travel.

    Parameters
    ----------
    micro_batch : int
        Its number in the batch, from 0 on.

    Examples
    --------
    >>> from mpicomp.pipeline import Forward
    >>> action = Forward(micro_batch=2)
    >>> str(action), action.source(stage=0, stages=4), action.destination(stage=0, stages=4)
    ('F2', None, 1)
    """

    _letter: ClassVar[str] = "F"
    _way: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Backward(_OfMicroBatch):
    """Run a micro-batch back through the stage, and release its graph; activation gradients travel.

    Parameters
    ----------
    micro_batch : int
        Its number in the batch, from 0 on.

    Examples
    --------
    >>> from mpicomp.pipeline import Backward
    >>> action = Backward(micro_batch=2)
    >>> str(action), action.source(stage=0, stages=4), action.destination(stage=0, stages=4)
    ('B2', 1, None)
    """

    _letter: ClassVar[str] = "B"
    _way: ClassVar[int] = -1


Action = Forward | Backward
"""Work of a stage on one micro-batch."""
Schedule = Callable[[int, int, int], tuple[Action, ...]]
"""Function of (stage, stages, micro-batches) that returns the stage's actions in order, such as `gpipe`."""


def gpipe(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Return a stage's actions: all micro-batches forward, then all of them backward.

    Parameters
    ----------
    stage, stages : int
        Number of the stage, from 0 on, and number of stages.
    micro_batches : int
        Number of micro-batches in a batch.

    Returns
    -------
    tuple of Action

    Raises
    ------
    ScheduleError
        There is no such stage, or no micro-batch.

    References
    ----------
    Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019
    (arXiv 1811.06965).

    Examples
    --------
    >>> from mpicomp.pipeline import gpipe
    >>> " ".join(map(str, gpipe(stage=0, stages=2, micro_batches=3)))
    'F0 F1 F2 B0 B1 B2'
    """
    _check(stage, stages, micro_batches)
    return (*map(Forward, range(micro_batches)), *map(Backward, range(micro_batches)))


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """Return a stage's actions: forward and backward in turn, after as many forwards as there are stages behind it.

    Parameters
    ----------
    stage, stages, micro_batches
        As in `gpipe`.

    Returns
    -------
    tuple of Action

    Raises
    ------
    ScheduleError
        There is no such stage, or no micro-batch.

    References
    ----------
    Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019.

    Examples
    --------
    >>> from mpicomp.pipeline import one_forward_one_backward
    >>> " ".join(map(str, one_forward_one_backward(stage=0, stages=2, micro_batches=3)))
    'F0 F1 B0 F2 B1 B2'
    """
    _check(stage, stages, micro_batches)
    ahead = min(stages - 1 - stage, micro_batches)
    actions: list[Action] = [Forward(micro_batch) for micro_batch in range(ahead)]
    for micro_batch in range(micro_batches - ahead):
        actions += [Forward(ahead + micro_batch), Backward(micro_batch)]
    actions += [Backward(micro_batch) for micro_batch in range(micro_batches - ahead, micro_batches)]
    return tuple(actions)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType({"gpipe": gpipe, "1f1b": one_forward_one_backward})
"""Schedules by name."""


def schedule(name_or_function: str | Schedule) -> Schedule:
    """Return the schedule of that name, or the function itself; ScheduleError or TypeError for anything else."""
    if callable(name_or_function):
        return name_or_function
    if not isinstance(name_or_function, str):
        raise TypeError(f"the schedule is {name_or_function!r:.80}: pass a name, such as '1f1b', or a function")
    if name_or_function not in SCHEDULES:
        raise ScheduleError(
            f"there is no schedule {name_or_function!r:.80}{suggestion(name_or_function, SCHEDULES)}: choose one of "
            f"{', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name_or_function]


def _check(stage: int, stages: int, micro_batches: int) -> None:
    for name, value in (("stage", stage), ("stages", stages), ("micro_batches", micro_batches)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ScheduleError(f"{name} is {value!r:.80}: pass an integer")
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(
            f"{stages} stages and {micro_batches} micro-batches make no pipeline: it takes at least one of each"
        )
    if not 0 <= stage < stages:
        raise ScheduleError(f"stage {stage} is not one of {stages} stages: count them from 0 to {stages - 1}")
