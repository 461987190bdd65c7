"""Ends a job that hangs, with the stacks of every rank."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.2
GRACE_S = 1.5
# Frames between the interpreter's start and the test.
UNINTERESTING = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen runpy>", "/threading.py", __file__)


class Watchdog:
    """Watches one rank's current test; the first rank to give up takes the whole job with it.

    The ranks of a job see each other through a file: after a deadlock they cannot through MPI. A rank that gives up
    makes that file, `last_words`, so that every other rank can print its own stacks before the job is ended.
    `release_output` returns the captured output and gives standard error back.
    """

    def __init__(self, rank: int, size: int, last_words: Path, release_output: Callable[[], str]) -> None:
        self._who = f"rank {rank} of {size}"
        self._last_words = last_words
        self._release_output = release_output
        self._ending = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, test: str, timeout_s: float) -> None:
        """Watch `test`, which may take `timeout_s` seconds."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._stop, test, timeout_s), daemon=True)
        self._thread.start()
        # The thread needs the interpreter lock, and a hang may hold it: this one is written in C.
        faulthandler.dump_traceback_later(timeout_s + 4 * GRACE_S, exit=True)

    def stop(self) -> None:
        """End the watch; does nothing where none is on."""
        faulthandler.cancel_dump_traceback_later()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end_job(self, reason: str) -> None:
        """Print `reason` and this rank's stacks, let the other ranks print theirs, and end the job."""
        with self._ending:
            self._last_words.touch()
            self._write(reason)
            time.sleep(GRACE_S)
            # Not MPI_Abort: the main thread may sit in MPI with its locks held. The launcher ends the other ranks.
            os._exit(1)

    def _watch(self, stop: threading.Event, test: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not stop.wait(LOOK_S):
            if time.monotonic() > deadline:
                self.end_job(f"{test} has not ended after {timeout_s:g} s")
            if self._last_words.exists():
                self.end_job(f"in {test} when another rank ended the job")

    def _write(self, reason: str) -> None:
        lines = [reason, *self._release_output().splitlines()]
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines += [line.rstrip() for line in file if not any(name in line for name in UNINTERESTING)]
        # A single write keeps the launcher from mixing the ranks' texts.
        os.write(2, "".join(f"\n[{self._who}] {line}" for line in lines).encode() + b"\n")
