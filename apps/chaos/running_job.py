"""A job that can be paused: several jobs take turns on one machine, and each is measured in its own turns alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.chaos.job import LAST_BYTES, end_processes, memory_files
from apps.chaos.lines import LineReader
from apps.launch import PROJECT, files_in


class RunningJob:
    """A launcher and its ranks, which write lines into files of `folder`; `end` removes it. See `apps.chaos.lines`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.folder, self.reader = folder, LineReader(folder)
        self._stack = contextlib.ExitStack()
        segments = self._stack.enter_context(memory_files())
        self._stopped: list[int] = []
        # of a group, but not a session, of its own: all jobs share the session's part of the processors
        with (folder / "output").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=PROJECT,
                env={**env, **files_in(segments)}, process_group=0,
            )  # fmt: skip

    def status(self) -> int | None:
        """Return the launcher's exit status; None while it runs."""
        return self._process.poll()

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the lines that ranks have written since the last call, each with the rank at the start."""
        return self.reader.read()

    def processes(self) -> list[int]:
        """Return the launcher and all processes that it has started."""
        return [self._process.pid, *descendants(self._process.pid)]

    def pause(self) -> None:
        """Stop the launcher and all ranks."""
        known: set[int] = set()
        # the launcher first, since it may be starting ranks
        while new := [pid for pid in self.processes() if pid not in known]:
            for pid in new:
                _send(pid, signal.SIGSTOP)
            known.update(new)
        self._stopped = sorted(known)

    def resume(self) -> None:
        """Let a paused job go on."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped = []

    def request_stacks(self) -> None:
        """Let each rank print the stacks of its threads."""
        for pid in self.reader.processes.values():
            _send(pid, signal.SIGUSR2)

    def end(self) -> str:
        """End all processes of the job, and remove its files; returns the end of its output."""
        self.resume()
        started = self.processes()[1:]
        end_processes(self._process, self.folder)
        for pid in started:  # that the launcher has not ended
            _send(pid, signal.SIGKILL)
        text = (self.folder / "output").read_bytes()[-LAST_BYTES:].decode(errors="replace")
        self._stack.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return text


def make_folder(parent: Path) -> Path:
    """Make a folder for one job."""
    return Path(tempfile.mkdtemp(prefix="job-", dir=parent))


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started.

    Examples
    --------
    >>> import os
    >>> import subprocess
    >>> import sys
    >>> from apps.chaos.running_job import descendants
    >>> child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    >>> child.pid in descendants(os.getpid())
    True
    >>> _ = child.communicate(b"end")
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = list[int](), [pid]
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
