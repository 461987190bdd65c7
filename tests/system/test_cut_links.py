"""A link that is cut for ever ends the job on both sides of it, the launcher and its daemons included."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.emulator.mpirun import mpirun
from apps.emulator.network import Layout, Network
from apps.emulator.network import run as run_command
from apps.launch import PROJECT
from collectives.cost.rate import Rate

LATEST_S = 240.0
TIMEOUT_S = 8.0
PROGRAM = """
import numpy as np
import mpicomp
with mpicomp.Communicator() as all_ranks:
    all_ranks.barrier()
    comm = mpicomp.Communicator(timeout=TIMEOUT_S, arrival_timeout=TIMEOUT_S, on_failure=MODE)
print("started", flush=True)
while True:
    comm.allreduce(np.ones(1000, np.float32))
"""


def wait_until(happened: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + LATEST_S
    while not happened():
        assert time.monotonic() < deadline, output.read_text(errors="replace")
        time.sleep(0.1)


@pytest.mark.timeout(3 * LATEST_S)
@pytest.mark.parametrize(("mode", "options"), [("raise", []), ("regroup", ["--with-ft", "ulfm"])])
def test_a_cut_link_ends_the_job_on_both_sides(tmp_path: Path, mode: str, options: list[str]) -> None:
    output, program = tmp_path / "output", f"MODE, TIMEOUT_S = {mode!r}, {TIMEOUT_S}\n{PROGRAM}"
    with Network(Layout((Rate.parse("1gbit"),) * 2)) as network:
        (launcher, *arguments), env = mpirun(network, tmp_path, "openmpi", 2, [sys.executable, "-c", program])
        command = network.nodes[0].command([launcher, *options, *arguments])
        settings = {"PYTHONPATH": str(PROJECT), "MPICOMP_END_LAUNCHER_AFTER": "1", "MPICOMP_FLIGHT_DIR": str(tmp_path)}
        with output.open("wb") as file:
            job = subprocess.Popen(command, env=env | settings, stdout=file, stderr=subprocess.STDOUT)

        def left() -> list[str]:
            pids = " ".join(run_command("ip", "netns", "pids", node.namespace) for node in network.nodes).split()
            return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]  # not of zombies

        try:
            wait_until(lambda: output.read_bytes().count(b"started") == 4, output)
            network.cut(1)
            wait_until(lambda: job.poll() is not None, output)
            assert job.returncode != 0
            wait_until(lambda: not left(), output)
        finally:
            job.kill()
            job.wait()
    text = output.read_text()
    assert "CollectiveTimeout" in text
    assert "no answer from ranks" in text
