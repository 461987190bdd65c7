"""Worker threads that encode, merge and decode pieces while the thread that makes the call polls.

Kernels hold no interpreter lock, so several pieces are worked on at the same time. The result for a piece does not
depend on the thread, so results have the same bits with any number of threads.

A piece takes some hundred microseconds. A pool of `concurrent.futures` holds the interpreter's lock for nearly as long
to pass a job to a thread and to wait for one of several; the queues here need a few microseconds.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

MOST_THREADS = 1024

Task = Callable[[], None]


class _Number(threading.local):
    value = 0


_number = _Number()


def worker_number() -> int:
    """Return the number, from 1 on, of the calling thread among its communicator's workers, or 0 if it is no worker."""
    return _number.value


class Workers:
    """Worker threads of one communicator; they start with the first piece."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._dismissed = False
        self._process = os.getpid()

    @property
    def are_here(self) -> bool:
        """Return whether this process has the threads: a forked one has not."""
        return os.getpid() == self._process

    def start(self, task: Task) -> None:
        """Pass a worker a task that raises nothing; after `dismiss` the task runs here.

        Raises
        ------
        RuntimeError
            The system starts no more threads.
        """
        if self._dismissed:
            task()
            return
        while len(self._started) < self.threads:
            number = len(self._started) + 1
            thread = threading.Thread(
                target=_serve, args=(self._tasks, number), name=f"mpicomp worker {number}", daemon=True
            )
            thread.start()
            self._started.append(thread)
            if number == 1:
                weakref.finalize(self, _dismiss, self._tasks, self.threads).atexit = False
        self._tasks.put(task)

    def dismiss(self) -> None:
        """End the threads once they have done their tasks."""
        if not self._dismissed:
            self._dismissed = True
            _dismiss(self._tasks, len(self._started))

    def close(self) -> None:
        """Dismiss the threads, and wait for them to end."""
        self.dismiss()
        for thread in self._started:
            thread.join()


def _serve(tasks: SimpleQueue[Task | None], number: int) -> None:
    _number.value = number
    while (task := tasks.get()) is not None:
        task()
        del task  # it holds buffers of a call, which are to be freed before the next task comes


def _dismiss(tasks: SimpleQueue[Task | None], threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)
