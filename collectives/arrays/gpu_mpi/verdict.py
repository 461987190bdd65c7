"""Verdict on whether this process hands memory of GPUs to MPI: from the user's setting, MPI's claims and a probe.

The first array on a GPU that is long enough to matter starts the probe, in a process of its own, since a wrong guess
ends in a segmentation fault; the verdict then holds for this process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from mpi4py import MPI

from collectives.annotations import Testable, override
from collectives.arrays.gpu_mpi import claims
from collectives.arrays.gpu_mpi.child import NO_START, WORKS, WRONG
from collectives.launcher import without_launcher

PATIENCE_S = 120.0  # PyTorch, from a disk that many ranks read at once, and CUDA
CHILD = Path(__file__).with_name("child.py")
VARIABLE = "MPICOMP_GPU_MPI"
Mode = Literal["auto", "on", "off"]


class Outcome(NamedTuple):
    """Result of a probe."""

    works: bool
    said: str  # the result in words


UNPROBED = {
    "off": Outcome(works=False, said=f"was not made, as {VARIABLE}=off"),
    "auto": Outcome(works=False, said="was not made, as nothing says that the MPI library takes memory of GPUs"),
}


def mode(environ: Mapping[str, str] = os.environ) -> Mode:
    """Return the user's setting, the environment's ``MPICOMP_GPU_MPI``.

    ``"auto"``: MPI is handed memory of GPUs where its library claims support and a probe confirms it; ``"on"``: it
    must be; ``"off"``: it never is.

    Raises
    ------
    ValueError
        The variable has another value.
    """
    value = environ.get(VARIABLE) or "auto"
    if value not in ("auto", "on", "off"):
        raise ValueError(f"{VARIABLE} is {value!r}: it must be auto, on or off")
    return cast(Mode, value)


class Probe(Testable):
    """A probe under way, whose `outcome` is None until it ends; its process is killed after `patience_s`.

    `device` is a GPU by its name in PyTorch; ``"cpu"`` tests the probe itself.
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


class Verdict:
    """Verdict of one process, made at the first request; `outcome` is None until it is known."""

    def __init__(self) -> None:
        self._probe: Probe | None = None
        self._lock = threading.Lock()
        self.outcome: Outcome | None = None

    def begin(self, device: str) -> Probe | None:
        """Return the probe, which starts at the first call with that call's GPU; None where no probe is needed."""
        with self._lock:
            if self.outcome is None and self._probe is None:
                chosen = mode()
                if chosen == "off" or (chosen == "auto" and not claims.are_positive(claims.claims())):
                    self.outcome = UNPROBED[chosen]
                else:
                    self._probe = Probe(device)
            return self._probe

    def end(self) -> Outcome:
        """Return the outcome, once the probe is over."""
        with self._lock:
            if self.outcome is None:
                assert self._probe is not None
                self.outcome = self._probe.wait()
            return self.outcome


verdict = Verdict()
"""Verdict of this process."""


def takes_memory(comm: object, device: str) -> bool:
    """Find out, outside of calls, whether MPI takes memory of a device in messages of a communicator."""
    if not carries(comm):
        return False
    verdict.begin(device)
    return verdict.end().works


def carries(comm: object) -> bool:
    """Return True if MPI carries the messages of a communicator; those between threads are copied instead."""
    return isinstance(comm, MPI.Comm)


def require_if_on(comm: object) -> None:
    """Require that MPI takes memory of GPUs where the user insists on it.

    Raises
    ------
    ValueError
        It does not, or the environment's ``MPICOMP_GPU_MPI`` has no meaning.
    """
    if mode() == "on" and carries(comm):
        verdict.begin(current_device())
        outcome = verdict.end()
        if not outcome.works:
            raise ValueError(
                f"{VARIABLE}=on, but MPI cannot be handed memory of GPUs: the probe {outcome.said}. "
                f"Set {VARIABLE}=auto, so that arrays travel through the host's memory where this is so, "
                "or load an MPI library that was built for your GPUs"
            )


def current_device() -> str:
    """Return the GPU that the program has chosen, where PyTorch is loaded; else the first."""
    torch = sys.modules.get("torch")
    return f"cuda:{torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0}"
