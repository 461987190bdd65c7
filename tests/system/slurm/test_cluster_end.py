"""What the tests start ends with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.slurm.cluster import DAEMONS, PROJECT, missing
from tests.system.slurm.job import POLL_S, WAIT_S
from tests.system.slurm.processes import arguments, link, processes

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
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
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
