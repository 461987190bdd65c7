"""End of an aggregator's steps where ranks may die: on all ranks or on none, with copies of residuals that are due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from collectives import Communicator
from mpicomp.recovery.residual_copies import ResidualCopies

if TYPE_CHECKING:
    from mpicomp.aggregator.call import VectorCall
    from mpicomp.aggregator.parts import Driver, Feedback


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
