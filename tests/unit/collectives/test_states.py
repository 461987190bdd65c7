"""Tests of a communicator's states, and of their table in the documentation."""

import pytest

import collectives
from collectives.group.calls import Calls
from collectives.group.users import Users
from collectives.states import FOLLOWING, State
from collectives.threads.run_local import run_local
from tests.documents import PROJECT

PAGE = PROJECT / "docs" / "architecture.md"


def documented() -> dict[State, frozenset[State]]:
    """Return the states of the page's table, with those that may follow."""
    lines = PAGE.read_text().partition("| state | since | may become |\n|---|---|---|\n")[2].splitlines()
    found = {}
    for line in lines[: lines.index("")]:
        state, _, following = (cell.strip() for cell in line.strip("|").split("|"))
        found[State(state)] = frozenset(map(State, following.split(", ")))
    return found


def test_documentation_lists_all_states_with_those_that_follow() -> None:
    assert documented() == FOLLOWING
    assert set(FOLLOWING) == set(State)


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_states_follow_by_the_table_alone(before: State, after: State) -> None:
    calls = Calls(Users())
    calls.state = before
    if after is before or after in FOLLOWING[before]:
        calls.enter(after, "a test")
        assert (calls.state, calls.reason) == (after, "a test")
        assert calls.is_open is (after is State.OPEN)
    else:
        with pytest.raises(AssertionError):
            calls.enter(after, "a test")
        assert calls.state is before


def test_close_closes_and_an_exception_gives_up() -> None:
    def close(comm: collectives.Communicator) -> tuple[State, State]:
        before = comm.calls.state
        comm.close()
        return before, comm.calls.state

    def leave(comm: collectives.Communicator) -> State:
        with pytest.raises(KeyError), comm:
            raise KeyError
        return comm.calls.state

    assert run_local(2, close) == [(State.OPEN, State.CLOSED)] * 2
    assert run_local(2, leave) == [State.GIVEN_UP] * 2
