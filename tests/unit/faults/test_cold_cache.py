"""Ranks that start together on an empty cache of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

N_RANKS = 4

# Tells how many kernels it took from the cache, and how many it had to compile. The method is the one whose kernels
# compile in the least time: each rank compiles all of them.
PROGRAM = """
from numba.core.caching import FunctionCache
mpicomp.install_abort_hook()
hits = []
load = FunctionCache.load_overload
FunctionCache.load_overload = lambda self, *args: hits.append(found := load(self, *args)) or found
with mpicomp.Communicator(timeout=NEVER_S) as comm:
    aggregator = mpicomp.CascadingSSDM().start(comm, 640)
    mean = aggregator.aggregate(np.full(640, 1.0, np.float32))
    tell(f"{START}-mean-{comm.rank}", mean.tobytes().hex())
    tell(f"{START}-loaded-{comm.rank}", sum(hit is not None for hit in hits))
    tell(f"{START}-compiled-{comm.rank}", sum(hit is None for hit in hits))
"""


@pytest.mark.timeout(3 * JOB_S)
def test_ranks_that_start_on_an_empty_kernel_cache_leave_it_whole(jobs: Jobs, tmp_path: Path) -> None:
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for start in ("empty", "warm"):
        job = jobs.run(N_RANKS, PROGRAM, env, START=start)
        status, output = job.finish()
        assert status == 0, output
        assert len({job.told(f"{start}-mean-{rank}") for rank in range(N_RANKS)}) == 1
    assert job.told("empty-mean-0") == job.told("warm-mean-0")
    assert any(job.told(f"empty-compiled-{rank}") != "0" for rank in range(N_RANKS))
    assert [job.told(f"warm-compiled-{rank}") for rank in range(N_RANKS)] == ["0"] * N_RANKS
    assert all(job.told(f"warm-loaded-{rank}") != "0" for rank in range(N_RANKS))
