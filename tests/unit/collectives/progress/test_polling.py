"""When a rank gives up: only time in which it looked for the others counts."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from collectives import CollectiveMismatch, CollectiveTimeout
from collectives.progress.polling import LONGEST_LOOK_S, Backoff, Limits


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
    """Computing of the caller between two looks, or a job that is stopped and continued."""
    now = 100.0
    monkeypatch.setattr("collectives.progress.polling.time.perf_counter", lambda: now)
    backoff = Backoff(Limits(2.0), lambda: "rank 1 of 2 waits")
    for _ in range(200):
        backoff.idle()
    now += 3600
    for _ in range(32):
        backoff.idle()
    assert backoff._stalled_s <= LONGEST_LOOK_S


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


class Missing:
    """Rank 2 does not come."""

    delay_s = 0.0
    mismatch = damage = ""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.told: str | None = ", nothing from rank 2"
        self.left = ""

    def send_question(self, call: int) -> float:
        self.asked.append(call)
        return 1.0

    def describe_late(self, call: int) -> str | None:
        return self.told

    def describe_gone(self, call: int) -> str:
        return self.left


class Waiting:
    """A wait on a clock of its own."""

    def __init__(self, arrival: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("collectives.progress.polling.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("collectives.progress.polling.time.sleep", lambda seconds: None)
        self.missing = Missing()
        group = SimpleNamespace(
            timeout=60.0, arrival_timeout=1800.0, given_up=None, observer=None, missing=self.missing
        )
        self.backoff = Backoff(group, lambda: "rank 1 of 3 waits")
        self.backoff.arrival = arrival

    def look(self, seconds: float) -> None:
        """Look for so long."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.backoff.idle(rest=False)


def test_who_comes_late_is_named_from_15_s_on_and_awaited_for_half_an_hour(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(7, monkeypatch)
    waiting.look(15)
    assert waiting.missing.asked == caplog.messages == []
    waiting.look(2)
    assert waiting.missing.asked == [7]
    assert caplog.messages == ["rank 1 of 3 waits for 16.5 s, nothing from rank 2; giving up after 1800 s"]
    waiting.look(100)
    assert [message.split()[6] for message in caplog.messages] == ["16.5", "34.5", "70.5"]
    waiting.look(1680)
    with pytest.raises(CollectiveTimeout, match="rank 1 of 3 waits after 1800 s"):
        waiting.look(10)


def test_a_rank_is_silent_where_a_lower_one_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(7, monkeypatch)
    waiting.missing.told = None
    waiting.look(100)
    assert caplog.messages == []


def test_silence_within_a_call_is_warned_of_from_15_s_on_and_ends_it_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting(None, monkeypatch)
    waiting.look(59)
    assert caplog.messages[0] == "rank 1 of 3 waits for 15.2 s; giving up after 60 s"
    with pytest.raises(CollectiveTimeout, match="rank 1 of 3 waits after 60"):
        waiting.look(2)
    assert waiting.missing.asked == []


def test_who_has_left_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(7, monkeypatch)
    waiting.look(3)
    waiting.missing.left = "rank 2 will not come"
    with pytest.raises(CollectiveTimeout, match="rank 1 of 3 waits: rank 2 will not come"):
        waiting.look(1)


def test_a_rank_without_all_descriptions_raises_the_error_of_a_rank_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(7, monkeypatch)
    waiting.backoff.mismatch, waiting.missing.mismatch = "barrier()", "the ranks differ: rank 0: barrier(); rank 1: sum"
    waiting.backoff.group.given_up = lambda: True
    with pytest.raises(CollectiveMismatch) as caught:
        waiting.look(1)
    assert str(caught.value) == waiting.missing.mismatch
