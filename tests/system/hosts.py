"""Jobs on emulated hosts, for tests that harm them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from apps.emulator.mpirun import mpirun
from apps.emulator.network import Layout, Network
from apps.emulator.network import run as run_command
from apps.launch import PROJECT
from collectives.cost.rate import Rate

LATEST_S = 240.0


class JobOnHosts:
    """Job of two ranks on each of two hosts, whose launcher is on the first; the file `output` has its output."""

    def __init__(self, network: Network, process: subprocess.Popen[bytes], output: Path) -> None:
        self.network, self.process, self._output = network, process, output

    @property
    def output(self) -> str:
        """Output so far."""
        return self._output.read_text(errors="replace")

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Poll until `happened`; fail with the output if it does not."""
        deadline = time.monotonic() + LATEST_S
        while not happened():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def finish(self) -> int:
        """Wait for the launcher's end, and return its status."""
        self.wait_until(lambda: self.process.poll() is not None)
        return int(self.process.returncode)

    def left(self) -> list[str]:
        """Return the processes on all hosts, but for zombies."""
        pids = " ".join(run_command("ip", "netns", "pids", node.namespace) for node in self.network.nodes).split()
        return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


@contextmanager
def job_on_hosts(
    folder: Path, program: str, options: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> Iterator[JobOnHosts]:
    """Run a program on two hosts that a link of 1 Gbit/s connects; `options` are the launcher's."""
    with Network(Layout((Rate.parse("1gbit"),) * 2)) as network:
        (launcher, *arguments), env = mpirun(network, folder, "openmpi", 2, [sys.executable, "-c", program])
        command = network.nodes[0].command([launcher, *options, *arguments])
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                env=env | {"PYTHONPATH": str(PROJECT)} | dict(settings or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield JobOnHosts(network, process, folder / "output")
        finally:
            process.kill()
            process.wait()
