"""Continuation of an aggregator among other ranks.

Survivors of a death go on from their own states and copies of others, newcomers that replace the dead from a peer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import Communicator
from collectives.consistency.descriptions import gather_objects
from collectives.execution.traffic import Traffic
from collectives.progress.polling import Backoff, Limits, drive
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.recovery.residual_copies import ResidualCopies, Saved, State, ages_of, with_copy
from mpicomp.state.redistribute import among_survivors

if TYPE_CHECKING:
    from mpicomp.aggregator.base import Aggregator
    from mpicomp.aggregator.parts import StateKind

Ages = dict[int, int | None]
"""Age in steps of the residual that was added for each dead rank, None where it is lost; empty: there are no copies."""


class Continuation:
    """Continuation of an aggregator among other ranks: its view as a `collectives.recovery.survivors.Survivor`."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator

    def save(self) -> Saved:
        """Return the state to go on from once the survivors have regrouped."""
        end = self._aggregator.joint_end
        held, size = (None, 0) if end is None or end.copies is None else (end.copies.held, end.copies.size)
        return Saved(self._aggregator.state(), held, size)

    def describe(self) -> str:
        """Return the kind of the vectors, the method and its tag, which are equal on all ranks."""
        return f"{self._aggregator.spec} by {self._aggregator.algorithm}, tag {self._aggregator.tag}"

    def enter(self, peers: Saved) -> Saved:
        """Return a newcomer's state, of that of a peer: equal counters and scales, no pending errors."""
        return state_of_newcomer(self._aggregator.algorithm, peers, self._aggregator.state_kinds)

    def restart(self, saved: Saved) -> None:
        """Begin with the ranks as they are now, before any step: others have yet to make theirs; not collective."""
        aggregator = self._aggregator
        aggregator.make_again()
        if {aggregator.state_kinds[key] for key in saved.state} <= {"mean", "shared"}:
            aggregator.load(saved.state)

    def renew(self, saved: Saved, survivors: tuple[int, ...]) -> Ages:
        """Go on among the survivors, each from its own residual and the copy that it holds; collective.

        Without copies the residuals of dead ranks are lost, and so are errors of elements that they owned.
        """
        aggregator = self._aggregator
        aggregator.make_again()
        comm, feedback, end = aggregator.comm, aggregator.feedback, aggregator.joint_end
        state, ages = state_of_survivor(comm, saved, survivors, aggregator.state_kinds, feedback.stand_in)
        aggregator.load(state)
        if end is not None and end.copies is not None:
            renew_copies(comm, end.copies, feedback.state(), aggregator.step, aggregator.tag)
        return ages


def renew_copies(comm: Communicator, copies: ResidualCopies, state: State, step: int, tag: int) -> None:
    """Exchange copies among the survivors; collective."""
    backoff = Backoff(Limits(comm.timeout), lambda: f"{comm.here}: no copy of the residual")
    drive(copies.exchange(state, step, tag, backoff, Traffic()), backoff)
    copies.keep()


def state_of_survivor(
    comm: Communicator, saved: Saved, survivors: Sequence[int], kinds: Mapping[str, StateKind], stand_in: Any
) -> tuple[State, Ages]:
    """Return a survivor's own state with the copy that it holds, and its share of errors that have owners; collective.

    `stand_in` is of the feedback, which makes the state of an owner that is gone; None: errors have no owners.
    """
    copy = saved.held
    dead = [rank for rank in range(saved.size) if rank not in survivors]
    ages: Ages = {}
    if dead:
        held = gather_objects(comm.mpi_comm, copy and (copy.rank, copy.step), comm.timeout)
        ages = ages_of(held, dead, saved.state["step"])
    state, of_dead = with_copy(saved.state, copy, dead, kinds)
    if not {kinds[key] for key in state} <= {"mean", "shared"}:
        everyones = gather_objects(comm.mpi_comm, (state, of_dead), comm.timeout)
        alive = [one for one, _ in everyones]
        state = among_survivors(alive, kinds, stand_in, [one for _, copied in everyones for one in copied])
    return state, ages


def state_of_newcomer(method: object, peers: Saved, kinds: Mapping[str, StateKind]) -> Saved:
    """Return a newcomer's state, of that of a peer: equal counters and scales, no pending errors.

    Raises
    ------
    ValueError
        Vectors are divided among the ranks of a node.
    """
    if "shard" in kinds.values():
        raise ValueError(f"{method} divides vectors among the ranks of a node, and takes no newcomers")
    there = peers.state
    state = {key: _without_errors(value) if kinds[key] in BY_ELEMENT else value for key, value in there.items()}
    state |= {key: np.zeros(2, np.int64) for key, kind in kinds.items() if kind == "owned" and key in there}
    return Saved(state, None, 0)


def _without_errors(value: Any) -> Any:
    """Return zeros in the shape of a state's entry."""
    if isinstance(value, dict):
        return {key: _without_errors(one) for key, one in value.items()}
    return np.zeros_like(value) if isinstance(value, np.ndarray) else value
