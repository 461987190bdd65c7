"""When a rank gives up: only time in which it looked for the others counts."""

from __future__ import annotations

import time

import pytest

from collectives import CollectiveTimeout
from collectives.progress.polling import Backoff, Limits


def wait_for_ever(backoff: Backoff) -> None:
    while True:
        backoff.idle()


def test_gives_up_after_the_timeout_with_the_reason() -> None:
    backoff = Backoff(Limits(0.2), lambda: "rank 1 of 2 waits")
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match="rank 1 of 2 waits after 0"):
        wait_for_ever(backoff)
    assert time.monotonic() - started >= 0.2


def test_time_spent_elsewhere_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller computes between two looks, or a job that is stopped and continued."""
    now = 100.0
    monkeypatch.setattr("collectives.progress.polling.time.perf_counter", lambda: now)
    backoff = Backoff(Limits(2.0), lambda: "rank 1 of 2 waits")
    for _ in range(200):
        backoff.idle()
    now += 3600
    for _ in range(32):
        backoff.idle()


def test_something_that_moves_starts_the_clock_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("collectives.progress.polling.time.perf_counter", lambda: now)
    backoff = Backoff(Limits(0.3), lambda: "rank 1 of 2 waits", lambda: now)
    for _ in range(3):
        for _ in range(64):
            backoff.idle()
        now += 0.2
        for _ in range(64):
            backoff.idle()
        backoff.moved()
    assert backoff.waited_s == pytest.approx(0.6)
