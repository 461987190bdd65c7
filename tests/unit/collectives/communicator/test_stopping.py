"""Requests to stop: noted while a communicator uses them, agreed on by ranks that are threads, harmless afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.communicator import stopping
from collectives.communicator.stopping import STOP_SIGNALS, StopSignals
from collectives.progress import main_thread
from collectives.threads.run_local import run_local

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def _no_signal_has_come(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)}
    monkeypatch.setattr(stopping, "STOP", StopSignals())
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def alone() -> Communicator:
    return Communicator(MPI.COMM_SELF)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


# One rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_stays_noted(number: signal.Signals) -> None:
    with alone() as comm:
        assert comm.stop_requested() is False
        signal.raise_signal(number)
        assert comm.stop_requested() is True
        assert comm.stop_requested() is True


@pytest.mark.parametrize("signals", [signal.SIGUSR2, (signal.SIGUSR2,)])
def test_the_signal_is_a_parameter(signals: signal.Signals | tuple[signal.Signals, ...]) -> None:
    before = handlers()
    with alone() as comm:
        assert not comm.stop_requested(signals)
        assert handlers() == before
        signal.raise_signal(signal.SIGUSR2)
        assert comm.stop_requested(signals)


def test_a_program_that_was_not_stopped_gets_its_handlers_back_with_the_last_communicator() -> None:
    before = handlers()
    with alone() as comm:
        comm.stop_requested()
        with alone() as other:
            other.stop_requested()
        assert before != handlers()
    assert handlers() == before


def test_handlers_are_restored_after_an_error_too() -> None:
    before = handlers()
    with suppress(KeyError), alone() as comm:
        comm.stop_requested()
        raise KeyError
    assert handlers() == before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_does_not_kill_a_rank_that_is_ending(number: signal.Signals) -> None:
    signal.signal(number, lambda *_: pytest.fail("the handler from before has been called"))
    with alone() as comm:
        comm.stop_requested()
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(number)


def test_a_signal_after_a_communicator_was_let_go_goes_to_the_handler_from_before() -> None:
    came = []
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    comm = alone()
    comm.stop_requested()
    closing = threading.Thread(target=comm.close)  # which can restore no handlers
    closing.start()
    closing.join()
    signal.raise_signal(signal.SIGUSR1)
    assert came == [signal.SIGUSR1]


def test_a_communicator_that_is_made_after_a_stop_starts_anew() -> None:
    with alone() as comm:
        comm.stop_requested()
        signal.raise_signal(signal.SIGUSR1)
        assert comm.stop_requested()
        with alone() as other:
            assert other.stop_requested()  # of the same run
    signal.raise_signal(signal.SIGUSR1)  # a second signal of the same request
    with alone() as later:
        assert not later.stop_requested()
        signal.raise_signal(signal.SIGTERM)
        assert later.stop_requested()


def test_a_signal_that_the_program_has_not_seen_is_kept_for_the_next_communicator() -> None:
    with alone() as comm:
        comm.stop_requested()
        signal.raise_signal(signal.SIGUSR1)
    with alone() as later:
        assert later.stop_requested()


def test_handlers_that_a_framework_has_replaced_are_installed_again() -> None:
    with alone() as comm:
        comm.stop_requested()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as a trainer restores handlers at its end
        assert not comm.stop_requested()
        signal.raise_signal(signal.SIGUSR1)
        assert comm.stop_requested()


def test_a_handler_that_came_later_stays_when_the_communicator_is_closed() -> None:
    with alone() as comm:
        comm.stop_requested()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_forked_process_ends_by_the_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # other tests of this process may have set a handler
    with alone() as comm:
        comm.stop_requested()
        context = multiprocessing.get_context("fork")
        started = context.Event()
        child = context.Process(target=lambda: (started.set(), time.sleep(60)))
        child.start()
        assert started.wait(30)
        child.terminate()
        child.join(30)
        assert child.exitcode == -signal.SIGTERM
        assert not comm.stop_requested()


@pytest.mark.parametrize("signals", [signal.SIGKILL, 1000, "SIGTERM"])
def test_signals_that_no_program_can_handle_are_refused(signals: int) -> None:
    with alone() as comm, pytest.raises(ValueError, match=r"cannot be handled; pass others, such as signal\.SIGUSR1"):
        comm.stop_requested(signals)


def test_a_thread_that_cannot_install_handlers_is_refused() -> None:
    errors = []

    def work() -> None:
        try:
            comm.stop_requested()
        except RuntimeError as error:
            errors.append(str(error))

    with alone() as comm:
        thread = threading.Thread(target=work, name="loader")
        thread.start()
        thread.join()
        assert errors == [
            "rank 0 of 1, stop_requested(): loader is not the main thread, and only that can install handlers; call it "
            "once in the main thread, before other threads do"
        ]
        assert not comm.stop_requested()
        thread = threading.Thread(target=work)  # now it can
        thread.start()
        thread.join()
        assert len(errors) == 1


# Ranks that are threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_threads_agree_on_the_step_at_which_they_stop(ranks: int) -> None:
    before = handlers()

    def train(comm: Communicator) -> int:
        for step in range(1000):
            if comm.stop_requested():
                return step
            if step == 3 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.001)  # the main thread, which runs the handler, needs the interpreter's lock
        return -1

    steps = run_local(ranks, train, timeout=TIMEOUT_S)
    assert len(set(steps)) == 1
    assert steps[0] > 3
    assert handlers() != before  # a second signal must not end the program


def test_ranks_that_are_threads_leave_the_handlers_as_they_were() -> None:
    before = handlers()
    assert run_local(3, lambda comm: comm.stop_requested(), timeout=TIMEOUT_S) == [False] * 3
    assert handlers() == before


def test_one_thread_alone_raises_and_the_others_name_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(comm: Communicator) -> str:
        try:
            return str(comm.stop_requested(signal.SIGKILL if comm.rank else STOP_SIGNALS))
        except (ValueError, CollectiveMismatch) as error:
            return f"{type(error).__name__}: {error}"

    first, second = run_local(2, ask, timeout=TIMEOUT_S)
    assert second.startswith("ValueError: rank 1 of 2, stop_requested(): signal")
    assert first.startswith("CollectiveMismatch")
    assert "rank 1 rejects stop_requested()" in first


# The main thread ------------------------------------------------------------------------------------------------------


def test_the_main_thread_works_for_threads_that_it_waits_for_and_passes_its_errors_on() -> None:
    found: list[object] = []

    def work(index: int) -> None:
        try:
            main_thread.run_in_main_thread(lambda: found.append(threading.current_thread()))
            main_thread.run_in_main_thread(lambda: {}[index])
        except KeyError as error:
            found.append(error.args[0])

    main_thread.run_threads(2, work, "rank {}")
    assert found.count(threading.main_thread()) == 2
    assert {0, 1} <= set(found)
