"""Threads of a program whose main thread waits for them and meanwhile does the work that it alone may do.

Python lets only the main thread install signal handlers. Ranks of `run_local` are other threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
_inbox: SimpleQueue[Work | None] | None = None  # of the main thread, while it waits in `run_threads`


class NotMainThread(RuntimeError):
    """Only the main thread can do this work, which neither runs here nor waits in `run_threads`."""


def run_threads(n: int, work: Callable[[int], None], name: str) -> None:
    """Call ``work(0)`` to ``work(n - 1)``, which must not raise, in daemon threads, and wait for all of them."""
    global _inbox
    inbox: SimpleQueue[Work | None] = SimpleQueue()

    def run(index: int) -> None:
        try:
            work(index)
        finally:
            inbox.put(None)

    threads = [threading.Thread(target=run, args=(i,), name=name.format(i), daemon=True) for i in range(n)]
    serves = threading.current_thread() is threading.main_thread()
    outer, _inbox = _inbox, inbox if serves else _inbox
    try:
        for thread in threads:
            thread.start()
        n_running = n
        while n_running:
            handed_over = inbox.get()
            if handed_over is None:
                n_running -= 1
            else:
                handed_over()
        for thread in threads:
            thread.join()
    finally:
        if serves:
            _inbox = outer


def run_in_main_thread(function: Work) -> None:
    """Call a function in the main thread, and raise its error here; NotMainThread unless `run_threads` waits there."""
    if threading.current_thread() is threading.main_thread():
        function()
        return
    inbox, done, errors = _inbox, threading.Event(), list[BaseException]()
    if inbox is None:
        raise NotMainThread(f"{threading.current_thread().name} is not the main thread")

    def report() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that handed the function over
            errors.append(error)
        done.set()

    inbox.put(report)
    done.wait()
    if errors:
        raise errors[0]
