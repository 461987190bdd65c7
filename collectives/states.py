"""States of a communicator; mpicomp help architecture has a table of them and of their order."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """State of a communicator's calls: they begin in the first one alone."""

    OPEN = "open"
    CLOSING = "closing"
    """A rank died while the ranks closed it: the survivors end it without a group of their own."""
    CLOSED = "closed"
    GIVEN_UP = "given up"
    """A call failed, an exception left the block, or the process was forked: MPI may still use its memory."""


FOLLOWING: dict[State, frozenset[State]] = {
    State.OPEN: frozenset({State.CLOSING, State.CLOSED, State.GIVEN_UP}),
    State.CLOSING: frozenset({State.CLOSED, State.GIVEN_UP}),
    State.CLOSED: frozenset({State.GIVEN_UP}),
    State.GIVEN_UP: frozenset({State.CLOSING, State.CLOSED}),
}
"""States that may follow each one."""
