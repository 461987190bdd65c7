"""Aggregators of ranks that may die: how their steps end, and how they go on when the ranks change.

Survivors of a death go on from their own states and copies of others, newcomers that replace the dead from a peer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import Communicator
from collectives.consistency.descriptions import gather_objects
from collectives.execution.traffic import Traffic
from collectives.progress.polling import Backoff, Limits, drive
from mpicomp.aggregator.call import tensors_listed
from mpicomp.aggregator.residual_copies import ResidualCopies, Saved, State, ages_of, with_copy
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.state.redistribute import among_survivors

if TYPE_CHECKING:
    from mpicomp.aggregator.base import Aggregator
    from mpicomp.aggregator.call import VectorCall
    from mpicomp.aggregator.parts import Driver, Feedback, StateKind

Ages = dict[int, int | None]
"""Age in steps of the residual that was added for each dead rank, None where it is lost; empty: there are no copies."""


class JointEnd:
    """End of an aggregator's steps on all ranks or on none, with the copies of residuals that are due before it.

    Attributes
    ----------
    copies : ResidualCopies or None
    """

    def __init__(self, comm: Communicator, method: object, driver: Driver, feedback: Feedback) -> None:
        assert comm.recovery is not None
        self._recovery, self._driver, self._feedback = comm.recovery, driver, feedback
        self.copies = make_copies(comm, method, driver, feedback)
        self._has_committed = False

    @property
    def description(self) -> str:
        """Words for the text that the ranks compare."""
        return "" if self.copies is None else f", residuals copied every {self.copies.every} steps,"

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """Return the last steps of a call: once they have ended, it ends on all ranks."""
        copies, step = self.copies, call.step + 1
        if copies is not None and copies.are_due(step):
            self._driver.commit()  # taken back unless all ranks have their copies
            self._has_committed = True
            yield from copies.exchange(self._feedback.state(), step, call.tag, call, call.traffic)
        yield from self._recovery.settled(call)

    def commit(self) -> None:
        """Make the state that the step has written the current one."""
        if not self._has_committed:
            self._driver.commit()
        elif self.copies is not None:
            self.copies.keep()
        self._has_committed = False

    def roll_back(self) -> None:
        """Keep the state of before the step, which has failed."""
        if self._has_committed and self._driver.can_undo:
            self._driver.undo()
        self._has_committed = False
        if self.copies is not None:
            self.copies.drop()
        self._driver.roll_back()

    def forget(self) -> None:
        """Forget the copy that is held, since the residuals were replaced."""
        if self.copies is not None:
            self.copies.forget()


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
        spec, lengths = self._aggregator.spec, self._aggregator.spec.tensor_lengths
        tensors = "" if lengths is None else f" in {tensors_listed(lengths)}"
        text = f"{spec.dtype}[{spec.n}]{tensors} number {spec.vector_id}"
        return f"{text} by {self._aggregator.algorithm}, tag {self._aggregator.tag}"

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


def make_copies(comm: Communicator, method: object, driver: Driver, feedback: Feedback) -> ResidualCopies | None:
    """Return the copies of residuals if the communicator has a period for them; None: there is nothing to copy.

    Raises
    ------
    ValueError
        The method cannot take back a step whose copies did not arrive.
    """
    every = comm.options.copy_residuals_every
    if every is None or comm.recovery is None or comm.size == 1:
        return None
    # residuals without elements are those of options that keep none
    state = feedback.state()  # which may have fewer entries than there are with a kind
    pending = [key for key, one in state.items() if key in feedback.pending_keys and np.size(one)]
    if not pending:
        return None
    if not driver.undoes:
        raise ValueError(
            f"{comm.here}: residuals of {type(method).__name__} cannot be copied every {every} steps: "
            "leave out copy_residuals_every, or take the method that it contains"
        )
    owned = [key for key in state if feedback.state_kinds.get(key) == "owned"]
    return ResidualCopies(comm, every, [*pending, *owned])


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
