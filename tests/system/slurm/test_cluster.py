"""A cluster that cannot start at first, and the end of one whose tests are killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.slurm import cluster as module
from tests.system.slurm.cluster import DAEMONS, PROJECT
from tests.system.slurm.job import POLL_S, WAIT_S
from tests.system.slurm.processes import arguments, link, processes

pytestmark = pytest.mark.usefixtures("possible")

HOLDER = """
import time
from tests.system.slurm.cluster import open_cluster
with open_cluster() as cluster:
    print(cluster.project.parent, cluster.env["OMPI_MCA_btl_sm_backing_directory"], flush=True)
    time.sleep(600)
"""


def programs(folder: str) -> set[str]:
    # a process that is ending has no arguments any more
    return {Path(told[0]).name for pid in processes() if link(pid, "cwd") == folder and (told := arguments(pid))}


@pytest.mark.timeout(900)
def test_daemons_do_not_outlive_tests_that_are_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        folder, segments = holder.stdout.readline().split()
        try:
            assert programs(folder) >= set(DAEMONS)
            holder.kill()
            deadline = time.monotonic() + WAIT_S
            while programs(folder):
                assert time.monotonic() < deadline, programs(folder)
                time.sleep(POLL_S)
        finally:
            holder.kill()
            shutil.rmtree(folder)
            shutil.rmtree(segments)


@pytest.mark.timeout(300)
def test_a_port_that_is_taken_after_it_was_found_free_costs_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module.free_ports
    starts = []

    def ports() -> list[int]:
        starts.append(found())
        if len(starts) == 1:
            return [taken.getsockname()[1], *starts[0][1:]]
        return starts[-1]

    monkeypatch.setattr(module, "free_ports", ports)
    with socket.create_server(("", 0)) as taken, module.open_cluster() as started:
        assert started.states() == {"idle"}
    assert len(starts) >= 2
