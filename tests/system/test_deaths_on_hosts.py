"""Deaths on several hosts: the launcher's status is that of ranks that are left on any of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.hosts import LATEST_S, job_on_hosts

PROGRAM = """
import os
import signal
import mpicomp
comm = mpicomp.Communicator(on_failure="regroup", timeout=20)
comm.barrier()
if comm.rank in DEAD:
    os.kill(os.getpid(), signal.SIGKILL)
print(f"{comm.allreduce(1.0):g} ranks are left", flush=True)
"""


@pytest.mark.timeout(2 * LATEST_S)
@pytest.mark.parametrize("dead", [(0, 1), (2, 3), (0, 1, 2, 3)])
def test_the_launcher_fails_if_no_rank_of_any_host_is_left(tmp_path: Path, dead: tuple[int, ...]) -> None:
    with job_on_hosts(tmp_path, f"DEAD = {dead}\n{PROGRAM}", ["--with-ft", "ulfm"]) as job:
        status = job.finish()
        job.wait_until(lambda: not job.left())
    left = 4 - len(dead)
    assert bool(status) == (not left), job.output
    assert job.output.count(f"{left} ranks are left") == left
