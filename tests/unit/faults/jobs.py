"""MPI jobs as a user starts them, for tests that harm them."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from apps.chaos.warm import WarmRanks
from apps.launch import files_in
from tests.run_lanes import environment

PROJECT = Path(__file__).resolve().parents[3]
# What a test waits for at most: far more than anything here takes on a busy machine, far less than NEVER_S, so that a
# job which ends has noticed the fault and not merely run out of patience.
JOB_S = 240.0
POLL_S = 0.02
FAULT_TOLERANT = ("--with-ft", "ulfm")

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpicomp
NEVER_S = 1000.0
FOLDER = Path(sys.argv[1])
def tell(name, text=""):
    (FOLDER / f".{name}").write_text(str(text))
    (FOLDER / f".{name}").rename(FOLDER / name)
"""


class Job:
    """An ``mpirun`` and its ranks, whose ``tell(name, text)`` leaves files in `folder`; the output goes there too."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
                env=env,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Return the output so far of all ranks and the launcher."""
        return self._output.read_text(errors="replace")

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Poll until `happened`; fail with the output if it does not."""
        deadline = time.monotonic() + JOB_S
        while not happened():
            assert time.monotonic() < deadline, f"after {JOB_S:g} s the job has not {what}:\n{self.output}"
            time.sleep(POLL_S)

    def told(self, name: str) -> str:
        """Wait for a rank's ``tell(name, text)`` and return the text."""
        path = self.folder / name
        self.wait_for(lambda: path.exists() or self.process.poll() is not None, f"told {name}")
        assert path.exists(), f"the job ended before it told {name}:\n{self.output}"
        return path.read_text()

    def load(self, name: str) -> np.ndarray:
        """Return the array that a rank has saved under a name; fail with the output where it has not."""
        path = self.folder / f"{name}.npy"
        assert path.exists(), f"the job ended without saving {name}:\n{self.output}"
        return np.load(path)

    def pid(self, rank: int) -> int:
        """Process of a rank that has called ``tell(f"pid-{rank}", os.getpid())``."""
        return int(self.told(f"pid-{rank}"))

    def ranks(self) -> list[int]:
        """Processes of the ranks that run now: Python's whose parent is the launcher."""
        launcher = str(self.process.pid)
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if stat.read_text().rpartition(")")[2].split()[1] == launcher:
                    found.append(int(stat.parent.name))
        return sorted(found)

    def await_end(self, pid: int) -> None:
        """Wait until a process has ended; where nobody collects orphans it stays as a zombie."""
        stat = Path(f"/proc/{pid}/stat")

        def ended() -> bool:
            try:
                return stat.read_text().rpartition(")")[2].split()[0] == "Z"
            except (FileNotFoundError, ProcessLookupError):
                return True

        self.wait_for(ended, f"ended its process {pid}")

    def finish(self) -> tuple[int, str]:
        """Wait for the end: exit status and output."""
        self.wait_for(lambda: self.process.poll() is not None, "ended")
        return self.process.returncode, self.output

    def end(self) -> None:
        """End the remaining processes of the job, stopped ranks included."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@cache
def _environment() -> dict[str, str]:
    return environment() | {"PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"}


@cache
def warm_ranks() -> WarmRanks:
    """Return the server from which this process's jobs copy their ranks; it ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch = [] if find_spec("torch") is None else ["torch._dynamo", "mpicomp.torch.ddp", "mpicomp.torch.optimizer"]
    return WarmRanks(folder, ["mpicomp.algorithms", *torch], _environment())


class Jobs:
    """Starts jobs, which write to `folder`, and ends them with the test."""

    def __init__(self, folder: Path, segments: str) -> None:
        self.folder, self._segments = folder, segments
        self._started: list[Job] = []

    def run(self, n_ranks: int, program: str, env: Mapping[str, str] = MappingProxyType({}), **constants: Any) -> Job:
        """Start `program` on all ranks, after the imports and functions of PRELUDE and the given constants."""
        return self._run([], n_ranks, program, env, constants)

    def run_tolerant(
        self, n_ranks: int, program: str, env: Mapping[str, str] = MappingProxyType({}), **constants: Any
    ) -> Job:
        """Like `run`, with ranks that outlive others."""
        return self._run(FAULT_TOLERANT, n_ranks, program, env, constants)

    def run_warm(
        self, n_ranks: int, program: str, env: Mapping[str, str] = MappingProxyType({}), **constants: Any
    ) -> Job:
        """Like `run_tolerant`, with ranks that are copies of a process in which all modules are loaded.

        For programs of many ranks: most of the time of such a job would be their start. An error in a program's end is
        seen by `run_tolerant` alone.
        """
        script = self._write(program, constants)
        command = warm_ranks().command(script, [str(self.folder)])
        return self._start(n_ranks, command, env, FAULT_TOLERANT)

    def run_by(self, launcher: Sequence[str], n_ranks: int, program: str) -> Job:
        """Like `run`, by the command of a launcher."""
        command = [*launcher, "-n", str(n_ranks), sys.executable, str(self._write(program, {})), str(self.folder)]
        self._started.append(Job(command, self.folder, _environment()))
        return self._started[-1]

    def _write(self, program: str, constants: Mapping[str, Any]) -> Path:
        script = self.folder / "program.py"
        assigned = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
        script.write_text(PRELUDE + assigned + textwrap.dedent(program))
        return script

    def _run(
        self, options: Sequence[str], n_ranks: int, program: str, env: Mapping[str, str], constants: Mapping[str, Any]
    ) -> Job:
        script = self._write(program, constants)
        return self.start(n_ranks, [str(script), str(self.folder)], env, options)

    def start(
        self,
        n_ranks: int,
        arguments: Sequence[str],
        env: Mapping[str, str] = MappingProxyType({}),
        options: Sequence[str] = (),
    ) -> Job:
        """Start Python with `arguments` on all ranks; `options` are the launcher's."""
        return self._start(n_ranks, [sys.executable, *arguments], env, options)

    def _start(self, n_ranks: int, rank: Sequence[str], env: Mapping[str, str], options: Sequence[str]) -> Job:
        # A job that is ended by force cleans nothing up.
        command = ["mpirun", *options, "-n", str(n_ranks), *rank]
        self._started.append(Job(command, self.folder, _environment() | files_in(self._segments) | dict(env)))
        return self._started[-1]

    def end(self) -> None:
        """End the jobs that still run."""
        for job in self._started:
            job.end()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Jobs of one test; those that still run at its end are ended."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as segments:
        started = Jobs(tmp_path, segments)
        yield started
        started.end()
