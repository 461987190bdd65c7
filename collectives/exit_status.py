"""Exit status of the program, which Python does not make available to its own last lines."""

from __future__ import annotations

import _sitebuiltins
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

exit_at_once = os._exit
_status: int | None = None
_message = ""


def watch_exit_status() -> None:
    """Record the exit status from now on. That of a bare ``raise SystemExit(3)`` cannot be recorded."""
    if sys.exit is not _noting_exit:
        sys.exit = _noting_exit
        setattr(_sitebuiltins.Quitter, "__call__", _quit)  # noqa: B010 - assigned otherwise it has no type


def exit_status() -> int:
    """Return the status that the program ends with; valid once its last frame has ended."""
    return _status or 0


def exit_message() -> str:
    """Return the text that the program ends with, as by ``sys.exit("no such file")``; empty without one."""
    return _message


def keep_exit_status(status: object) -> None:
    """Record the argument of `sys.exit` that ends the program. Those of exceptions caught before do not count."""
    global _status, _message
    if _status is None:
        _status, _message = status_code(status), status if isinstance(status, str) else ""


class _Ending:
    """Object of a `SystemExit`, which is freed with it: if no frame of Python is left then, it has ended the program.

    A `SystemExit` may also be caught, and then does not end the program.
    """

    def __init__(self, status: object) -> None:
        self._status = status

    def __del__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            try:
                sys._getframe(1)
            except ValueError:
                keep_exit_status(self._status)


def status_code(status: object) -> int:
    """Return the number that the system receives for an argument of `sys.exit`."""
    return 0 if status is None else status if isinstance(status, int) else 1


def _noting_exit(status: object = None, /) -> NoReturn:
    error = SystemExit() if status is None else SystemExit(status)
    error.__dict__["_ending"] = _Ending(status)
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame, which would be a cycle of references


def _quit(quitter: object, code: str | int | None = None) -> NoReturn:
    with suppress(Exception):
        sys.stdin.close()  # as without this module
    sys.exit(code)


def before_exit_at_once(function: Callable[[int], None], within_s: float) -> None:
    """Call `function` with the status before `os._exit` ends this process, and never in processes forked from it.

    The process ends after `within_s` seconds in any case: `os._exit` may be called where another thread is stuck.
    """
    pid, is_ending = os.getpid(), threading.Lock()

    def leave(status: int) -> NoReturn:
        try:
            # no second time, if a signal or another thread interrupts the first
            if os.getpid() == pid and is_ending.acquire(blocking=False):
                caller = threading.Thread(target=function, args=(status,), name="mpicomp: os._exit", daemon=True)
                caller.start()
                caller.join(within_s)
        finally:
            exit_at_once(status)

    if os._exit is exit_at_once:
        os._exit = leave
