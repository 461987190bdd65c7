"""States from which aggregators go on when the ranks change: survivors of a death, and newcomers that replace the dead.

The functions work on saved states, and leave it to `Aggregator` to make its parts again and load them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives import Communicator
from collectives.consistency.descriptions import gather_objects
from collectives.execution.traffic import Traffic
from collectives.progress.polling import Backoff, Limits, drive
from mpicomp.aggregator.residual_copies import ResidualCopies, Saved, State, ages_of, with_copy
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.feedback.redistribute import among_survivors

if TYPE_CHECKING:
    from mpicomp.aggregator.parts import Driver, Feedback, StateKind

Ages = dict[int, int | None]
"""Age in steps of the residual that was added for each dead rank, None where it is lost; empty: there are no copies."""


def make_copies(comm: Communicator, method: object, driver: Driver, feedback: Feedback) -> ResidualCopies | None:
    """Return the copies of residuals if the communicator has a period for them; None: there is nothing to copy.

    Raises
    ------
    ValueError
        The method cannot take back a step whose copies did not arrive.
    """
    every = comm.options.copy_residuals_every
    if every is None or comm.regroup is None or comm.size == 1:
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
