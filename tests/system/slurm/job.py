"""A submitted batch job, as the tests watch it and hold it up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.system.slurm.processes import arguments, link, processes

if TYPE_CHECKING:
    from tests.system.slurm.cluster import SlurmCluster

# Longest wait of a test: far more than anything here takes on a busy machine.
WAIT_S = 600.0
POLL_S = 0.1


@dataclass(frozen=True)
class JobRecord:
    """Return the fields of ``scontrol show job``."""

    state: str  # as RUNNING, COMPLETED
    exit_code: str  # exit status and signal of the batch script, as 0:0
    steps: str  # the highest of its steps, written likewise
    restarts: int


class Job:
    """A submitted batch job; `folder` is where ``slurm/train.sbatch`` leaves checkpoints and JSON lines."""

    def __init__(self, cluster: SlurmCluster, name: str, number: str) -> None:
        self._cluster = cluster
        self.id = number
        self.folder = cluster.project / "runs" / f"train-{number}"
        self._output = cluster.project / f"{name}-{number}.out"

    @property
    def output(self) -> str:
        """Return the output so far of the script, the launcher and all ranks."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def record(self) -> JobRecord:
        """The job as the controller sees it now."""
        line = self._cluster.run("scontrol", "--oneliner", "--details", "show", "job", self.id)
        fields = dict(field.partition("=")[::2] for field in line.split())
        return JobRecord(fields["JobState"], fields["ExitCode"], fields["DerivedExitCode"], int(fields["Restarts"]))

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Poll until `happened`; if it does not, fail with the job's output and the daemons' last words."""
        deadline = time.monotonic() + WAIT_S
        while not happened():
            self._cluster.check()
            assert time.monotonic() < deadline, (
                f"after {WAIT_S:g} s job {self.id} has not {what}: {self.record}\n{self.output}\n{self._cluster.logs}"
            )
            time.sleep(POLL_S)

    def said(self, text: str, times: int = 1) -> None:
        """Wait until the output has `text` in it."""
        self.wait_for(lambda: self.output.count(text) >= times, f"said {text!r} ({times} x)")

    def hold(self) -> None:
        """Stop the ranks' processes, so that nothing goes on until `go_on` or Slurm's SIGCONT."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `hold`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        ranks = [pid for pid in processes() if self._is_rank(pid)]
        assert ranks, f"job {self.id} has no ranks: {self.record}\n{self.output}"
        for pid in ranks:
            os.kill(pid, number)

    def _is_rank(self, pid: int) -> bool:
        program, *rest = arguments(pid) or [""]
        here = link(pid, "cwd") == str(self._cluster.project)
        return here and program.endswith("python") and f"runs/{self.folder.name}" in rest

    def end(self) -> JobRecord:
        """Wait until the job has ended for good, in any state."""
        unfinished = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED"}
        self.wait_for(lambda: self.record.state not in unfinished, "ended")
        # State is final before the nodes are free again and the last output written.
        self.wait_for(lambda: self._cluster.states() == {"idle"}, "left its nodes")
        return self.record
