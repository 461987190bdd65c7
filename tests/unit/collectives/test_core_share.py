"""A progress thread that has to wait for its core sleeps now and then, and no other one does."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.progress import thread
from collectives.progress.thread import BLINKS, SHARE_S, CoreShare


class Clock:
    """Time on the wall, the thread's time on a core, and its sleeps."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.sleeps = 0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1

    def run(self, share: CoreShare, turns: int, share_of_core: float) -> None:
        for _ in range(turns):
            self.now += 1.5 * SHARE_S
            self.used += 1.5 * SHARE_S * share_of_core
            share.claim()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Clock()
    monkeypatch.setattr(thread, "time", made)
    return made


def test_a_thread_with_a_core_of_its_own_never_sleeps(clock: Clock) -> None:
    clock.run(CoreShare(), 1000, 0.99)
    assert clock.sleeps == 0


def test_a_thread_that_waits_for_a_core_sleeps_for_a_while_in_every_turn(clock: Clock) -> None:
    share = CoreShare()
    clock.run(share, 1, 0.1)
    assert clock.sleeps == 1
    clock.run(share, 2 * BLINKS, 1.0)
    assert clock.sleeps == BLINKS


def test_sleep_for_want_of_work_does_not_count(clock: Clock) -> None:
    share = CoreShare()
    for _ in range(100):
        clock.now += 1.0
        share.restart()
        clock.run(share, 1, 1.0)
    assert clock.sleeps == 0
