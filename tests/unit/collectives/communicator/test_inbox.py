"""Receives of one rank and tag: their contents are received in their order, whichever is polled, by whomever."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from collectives.arrays.vectors import flat
from collectives.communicator.inbox import Inbox, header_of

X = flat(np.zeros(3, np.float32))


class Heading:
    """Receive of a header, which is over when `test` returns True."""

    def __init__(self, test: Callable[[], bool]) -> None:
        self.Test = test


class Ranks:
    """A communicator whose headers arrive once these functions return True; `posted` counts receives of contents."""

    def __init__(self, *tests: Callable[[], bool]) -> None:
        self._tests, self.posted = list(tests), 0

    def Irecv(self, memory: Any, source: int, tag: int) -> Any:  # noqa: N802 - MPI's name
        if tag == 0:
            memory[:] = np.frombuffer(header_of(X), np.uint8)
            return Heading(self._tests.pop(0))
        self.posted += 1
        return self.posted


def begun(inbox: Inbox, stack: ExitStack, *tests: Callable[[], bool]) -> tuple[Ranks, list[Any]]:
    """Return a communicator, and a receive for each header."""
    ranks: Any = Ranks(*tests)
    receives = [inbox.begin(ranks, X, 0, 0) for _ in tests]
    for one in receives:
        stack.callback(inbox.drop, one)
    return ranks, receives


def test_a_header_that_has_come_waits_for_those_before_it() -> None:
    arrived: list[bool] = []
    with ExitStack() as stack:
        inbox = Inbox()
        ranks, (first, second) = begun(inbox, stack, lambda: bool(arrived), lambda: True)
        inbox.go_on()
        assert ranks.posted == 0
        arrived.append(True)
        inbox.go_on()
        assert (first.request, second.request) == (1, 2)


def test_an_error_of_a_receive_is_its_own_and_later_ones_do_not_take_its_content() -> None:
    def fail() -> bool:
        raise MemoryError

    with ExitStack() as stack:
        inbox = Inbox()
        ranks, (first, second) = begun(inbox, stack, fail, lambda: True)
        inbox.go_on()
        inbox.go_on()
        assert isinstance(first.error, MemoryError)
        assert (second.error, second.request, ranks.posted) == (None, None, 0)


def test_a_signal_handler_that_polls_within_a_poll_returns() -> None:
    inbox = Inbox()

    def poll() -> bool:
        inbox.go_on()
        return True

    with ExitStack() as stack:
        _, (first,) = begun(inbox, stack, poll)
        inbox.go_on()
        assert first.request == 1


def test_a_receive_that_is_given_up_keeps_no_later_one_waiting() -> None:
    with ExitStack() as stack:
        inbox = Inbox()
        with ExitStack() as given_up:
            begun(inbox, given_up, lambda: False)
        _, (later,) = begun(inbox, stack, lambda: True)
        inbox.go_on()
        assert later.request == 1


def test_the_error_of_a_signal_handler_is_raised_where_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> bool:
        raise TimeoutError

    monkeypatch.setattr("collectives.communicator.inbox.is_of_handler", lambda error: True)
    with ExitStack() as stack:
        inbox = Inbox()
        _, (first,) = begun(inbox, stack, interrupted)
        with pytest.raises(TimeoutError):
            inbox.go_on()
        assert first.error is None
