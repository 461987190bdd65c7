"""Probe that MPI takes memory of a GPU, in a process of its own: a wrong guess ends in a segmentation fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

from collectives.annotations import Testable, override
from collectives.arrays.gpu_mpi.child import NO_START, WORKS, WRONG
from collectives.launcher import without_launcher

PATIENCE_S = 120.0  # PyTorch, from a disk that many ranks read at once, and CUDA
CHILD = Path(__file__).with_name("child.py")


class Outcome(NamedTuple):
    """Result of a probe.

    Attributes
    ----------
    works : bool
    said : str
        The result in words.
    """

    works: bool
    said: str


class Probe(Testable):
    """A probe under way.

    Parameters
    ----------
    device : str
        A GPU by its name in PyTorch; ``"cpu"`` tests the probe itself.
    patience_s : float
        Seconds after which the process is killed.

    Attributes
    ----------
    outcome : Outcome or None
        None as long as it is under way.
    """

    def __init__(self, device: str, patience_s: float = PATIENCE_S) -> None:
        self.outcome: Outcome | None = None
        self._stdout, self._stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - see _end
        self._testing = threading.Lock()
        self._patience_s, self._deadline = patience_s, time.monotonic() + patience_s
        command = [sys.executable, "-P", str(CHILD), device]  # -P: this folder is no place to import from
        try:
            self._process = subprocess.Popen(
                command,
                env=without_launcher(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                stderr=self._stderr,
            )
        except OSError as error:
            self._end(Outcome(works=False, said=f"could not start: {error}"))

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        # several threads may call it
        with self._testing:
            if self.outcome is None:
                self._look()
        return self.outcome is not None

    def _look(self) -> None:
        status = self._process.poll()
        if status is not None:
            self._end(outcome_of(status, _last_line(self._stdout), _last_line(self._stderr)))
        elif time.monotonic() > self._deadline:
            self._process.kill()
            self._process.wait()
            self._end(Outcome(works=False, said=f"did not end in {self._patience_s:g} s"))

    def wait(self) -> Outcome:
        """Wait for the outcome, outside of calls."""
        while not self.Test():
            time.sleep(0.01)
        assert self.outcome is not None
        return self.outcome

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._stdout.close()
        self._stderr.close()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def outcome_of(status: int, printed: str, complaint: str) -> Outcome:
    """Return the outcome of a process that has ended by itself, from its status and its last lines."""
    if status < 0:
        return Outcome(works=False, said=f"crashed with {signal.Signals(-status).name}")
    verdict, _, said = printed.partition(": ")
    if status == 0 and verdict == WORKS:
        return Outcome(works=True, said=f"works: {said}")
    if verdict == WRONG:
        return Outcome(works=False, said=f"found wrong values: {said}")
    if verdict == NO_START:
        return Outcome(works=False, said=f"could not start: {said}")
    return Outcome(works=False, said=f"ended with status {status} and no result: {complaint or 'it said nothing'}")
