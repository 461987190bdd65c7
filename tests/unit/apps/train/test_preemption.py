"""Requests to stop: noted while a run can act on them, and harmless once it does."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from apps.train.preemption import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested


def test_a_run_that_was_not_stopped_leaves_the_handlers_as_they_were() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_does_not_kill_a_run_that_is_ending(number: signal.Signals) -> None:
    signal.signal(number, lambda *_: pytest.fail("the handler from before has been called"))
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(number)
    assert stop.requested
