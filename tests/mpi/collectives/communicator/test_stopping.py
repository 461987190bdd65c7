"""Requests to stop: a signal on any rank stops all ranks at one step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from collectives import CollectiveMismatch, Communicator
from collectives.communicator import stopping
from collectives.communicator.stopping import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def _no_signal_has_come(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(stopping, "STOP", StopSignals())
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("place", [0, -1])
def test_a_signal_on_one_rank_stops_all_ranks_at_the_same_step(
    number: signal.Signals, place: int, comm: Communicator
) -> None:
    stopped = -1
    for step in range(50):
        if comm.stop_requested():
            stopped = step
            break
        if step == 5 and comm.rank == place % comm.size:
            os.kill(os.getpid(), number)
        time.sleep(0.001 * (comm.rank % 2))
    assert set(comm.mpi_comm.allgather(stopped)) == {6}


def test_a_rank_that_had_no_signal_is_not_killed_by_a_late_one(comm: Communicator) -> None:
    comm.stop_requested()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    assert comm.stop_requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert comm.stop_requested()


def test_an_error_of_one_rank_is_raised_on_all(comm: Communicator) -> None:
    last = comm.size - 1
    expected = ValueError if comm.rank == last else CollectiveMismatch
    with pytest.raises(expected, match="cannot be handled"):
        comm.stop_requested(signal.SIGKILL if comm.rank == last else STOP_SIGNALS)
    assert not comm.stop_requested()
