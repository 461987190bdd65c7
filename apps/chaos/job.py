"""Jobs whose ranks die: started on this machine or on emulated hosts, watched, and ended with their stacks kept."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps.chaos.warm import WarmRanks
from apps.emulator.mpirun import mpirun
from apps.emulator.network import Network
from apps.launch import GRACE_S, PROJECT, files_in, find_mpirun, mpi_environment

FAULT_TOLERANT = ("--with-ft", "ulfm")
POLL_S, STACKS_S = 0.02, 3.0
LAST_BYTES = 20_000


@dataclass(frozen=True)
class Ended:
    """End of a job."""

    status: int | None  # of the launcher; None: without progress for `patience_s`, and ended
    output: str  # its end, of launcher and ranks, with their stacks after a hang
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # lines by the rank at the start
    seconds: float = 0.0
    states: dict[int, str] = field(default_factory=dict)  # of the ranks that have written one


class Launcher:
    """Starts fault-tolerant jobs of a `program` of `apps.chaos`, one after the other."""

    def __init__(self, network: Network | None = None, folder: Path | None = None, program: str = "rank") -> None:
        # emulated hosts, of which a job takes the first ones, a rank each; None: this machine
        self.network, self._program = network, program
        self._env = mpi_environment() | {"PYTHONUNBUFFERED": "1"}
        # the folder has the socket of `apps.chaos.warm`; without it each rank starts from scratch
        self._warm = None if folder is None else WarmRanks(folder, [f"apps.chaos.{program}"], self._env)

    def close(self) -> None:
        """End the process from which ranks are copied."""
        if self._warm is not None:
            self._warm.close()

    def rank_command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command of one rank."""
        if self._warm is None:
            return [sys.executable, "-m", f"apps.chaos.{self._program}", *arguments]
        return self._warm.command(PROJECT / "apps" / "chaos" / f"{self._program}.py", arguments)

    def run(
        self, ranks: int, arguments: Sequence[str], folder: Path, patience_s: float, longest_s: float = float("inf")
    ) -> Ended:
        """Run the program with `arguments` on so many ranks, which write lines into files of `folder`."""
        with memory_files() as segments:
            command, env = self._command(ranks, self.rank_command(arguments), folder)
            env |= files_in(segments)
            output = folder / "output"
            start = time.monotonic()
            with output.open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=PROJECT, env=env,
                    start_new_session=True,
                )  # fmt: skip
            try:
                # without a line of any rank for `patience_s` it is a hang; behind `longest_s` the job ends without
                # being one
                status = _watch(process, folder, patience_s, start + longest_s)
            finally:
                end_processes(process, folder)
            text = output.read_bytes()[-LAST_BYTES:].decode(errors="replace")
            states = {int(path.name.partition("-")[2]): path.read_text() for path in folder.glob("state-*")}
            return Ended(status, text, read_rows(folder), time.monotonic() - start, states)

    def _command(self, ranks: int, command: Sequence[str], folder: Path) -> tuple[list[str], dict[str, str]]:
        if self.network is None:
            start = [find_mpirun(), *FAULT_TOLERANT, "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *command]
            return start, dict(self._env)
        hosts = copy.copy(self.network)
        hosts.nodes = self.network.nodes[:ranks]
        start, env = mpirun(hosts, folder, "openmpi", 1, command)
        start[1:1] = FAULT_TOLERANT
        return hosts.nodes[0].command(start), self._env | env | {"PYTHONPATH": str(PROJECT)}


def read_rows(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines that each rank has written; a line that a killed rank has not ended is left out."""
    rows = {}
    for path in folder.glob("rank-*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        rows[int(path.stem.partition("-")[2])] = [json.loads(line) for line in lines]
    return dict(sorted(rows.items()))


def processes(folder: Path) -> dict[int, int]:
    """Return the process of each rank that has started."""
    return {rank: row["pid"] for rank, rows in read_rows(folder).items() for row in rows if row["kind"] == "start"}


def _watch(process: subprocess.Popen[bytes], folder: Path, patience_s: float, end: float) -> int | None:
    seen, last = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        if now > end:
            return 0
        if (written := sum(path.stat().st_size for path in folder.glob("rank-*.jsonl"))) != seen:
            seen, last = written, now
        elif now - last > patience_s:
            for pid in processes(folder).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
            time.sleep(STACKS_S)
            return None
    return process.returncode


def end_processes(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End all processes of a job."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    for pid in processes(folder).values():
        with contextlib.suppress(OSError):
            if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes():  # else another process has the number by now
                os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def memory_files() -> Iterator[str]:
    """Make a folder for files of Open MPI, which killed jobs leave behind; it is in memory, as those of ranks are."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="chaos-", dir=memory if memory.is_dir() else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
