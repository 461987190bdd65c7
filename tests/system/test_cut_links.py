"""A link that is cut for ever ends the job on both sides of it, the launcher and its daemons included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.hosts import LATEST_S, job_on_hosts

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


@pytest.mark.timeout(3 * LATEST_S)
@pytest.mark.parametrize(("mode", "options"), [("raise", []), ("regroup", ["--with-ft", "ulfm"])])
def test_a_cut_link_ends_the_job_on_both_sides(tmp_path: Path, mode: str, options: list[str]) -> None:
    program = f"MODE, TIMEOUT_S = {mode!r}, {TIMEOUT_S}\n{PROGRAM}"
    settings = {"MPICOMP_END_LAUNCHER_AFTER": "1", "MPICOMP_FLIGHT_DIR": str(tmp_path)}
    with job_on_hosts(tmp_path, program, options, settings) as job:
        job.wait_until(lambda: job.output.count("started") == 4)
        job.network.cut(1)
        assert job.finish() != 0
        job.wait_until(lambda: not job.left())
        text = job.output
    assert "CollectiveTimeout" in text
    assert "no answer from ranks" in text
