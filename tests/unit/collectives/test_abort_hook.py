"""When the abort hook is installed, and how short the tracebacks are that it prints."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback

import numpy as np
import pytest

from collectives import CollectiveMismatch, abort_hook, error_report, process_end
from mpicomp import Communicator, Marsit


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that the hook is installed, and restore the hooks that it wraps."""
    monkeypatch.setattr(abort_hook, "_installed", False)
    monkeypatch.setattr(process_end, "_has_abort_hook", False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(atexit, "register", lambda function: function)


@pytest.mark.usefixtures("fresh")
def test_installing_twice_wraps_once() -> None:
    before = sys.excepthook
    abort_hook.install_abort_hook()
    installed = sys.excepthook, threading.excepthook
    assert before is not installed[0]
    abort_hook.install_abort_hook()
    assert (sys.excepthook, threading.excepthook) == installed


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("attended", ["by pytest", "by a person", "by who says so", "by nobody"])
def test_where_somebody_goes_on_after_an_exception_the_hook_is_not_installed_unasked(
    attended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attended != "by pytest":
        monkeypatch.delitem(sys.modules, "pytest")
    if attended == "by a person":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setenv("MPICOMP_ABORT_HOOK", "0" if attended == "by who says so" else "1")
    before = sys.excepthook
    abort_hook.install_unless_attended()
    assert (sys.excepthook is before) == (attended != "by nobody")


def shown(error: BaseException) -> list[str]:
    """Lines that the hook would print."""
    trace = error_report.shorten_traceback(error, error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace)).splitlines()


def wrong(comm: Communicator) -> BaseException:
    aggregator = Marsit().start(comm, 10)
    with pytest.raises(TypeError) as caught:
        aggregator.aggregate(np.ones(10))
    return caught.value


def test_of_an_error_that_explains_itself_only_the_callers_lines_are_shown(comm: Communicator) -> None:
    lines = shown(wrong(comm))
    assert len(lines) <= 5
    assert "aggregator.aggregate(np.ones(10))" in "".join(lines)
    assert lines[-1].startswith("TypeError: rank 0 of 1, vector 0: the vector has type float64")


def test_all_lines_are_shown_where_they_are_asked_for(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOMP_TRACEBACK", "full")
    assert "base.py" in "".join(shown(wrong(comm)))


def test_other_errors_keep_all_their_lines(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator = Marsit().start(comm, 10)
    monkeypatch.setattr(aggregator.driver, "prepare", None)  # a mistake of this library's
    with pytest.raises(TypeError) as caught:
        aggregator.aggregate(np.ones(10, np.float32))
    assert "base.py" in "".join(shown(caught.value)) or "call_check.py" in "".join(shown(caught.value))


def test_an_error_that_was_caused_by_another_is_shown_alone() -> None:
    error = CollectiveMismatch("the ranks differ")
    error.__cause__ = KeyError("the cause")
    assert "the cause" in "".join(traceback.format_exception(error))
    assert "the cause" not in "".join(shown(error))
