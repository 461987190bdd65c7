"""Ranks that start together on an empty cache of compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

N_RANKS = 4

# Tells how many kernels it took from the cache, and which ones it had to compile, before the first call and within it.
# The method is the one whose kernels compile in the least time.
PROGRAM = """
from mpicomp.kernels.cpu.kernel import _KernelCache
mpicomp.install_abort_hook()
hits, compiled = [], []
load, save = _KernelCache.load_overload, _KernelCache.save_overload
_KernelCache.load_overload = lambda self, *args: hits.append(found := load(self, *args)) or found
_KernelCache.save_overload = lambda self, sig, data: compiled.append(self.file_of(sig)) or save(self, sig, data)
with mpicomp.Communicator(timeout=NEVER_S) as comm:
    aggregator = mpicomp.CascadingSSDM().start(comm, 640)
    early = len(compiled)
    mean = aggregator.aggregate(np.full(640, 1.0, np.float32))
    tell(f"{START}-mean-{comm.rank}", mean.tobytes().hex())
    tell(f"{START}-loaded-{comm.rank}", sum(hit is not None for hit in hits))
    tell(f"{START}-compiled-{comm.rank}", ",".join(compiled))
    tell(f"{START}-late-{comm.rank}", len(compiled) - early)
"""


@pytest.mark.timeout(3 * JOB_S)
def test_ranks_that_start_on_an_empty_cache_compile_each_kernel_once_and_before_a_call(
    jobs: Jobs, tmp_path: Path
) -> None:
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for start in ("empty", "warm"):
        job = jobs.run(N_RANKS, PROGRAM, env, START=start)
        status, output = job.finish()
        assert status == 0, output
        assert len({job.told(f"{start}-mean-{rank}") for rank in range(N_RANKS)}) == 1
    assert job.told("empty-mean-0") == job.told("warm-mean-0")
    compiled = [name for rank in range(N_RANKS) for name in job.told(f"empty-compiled-{rank}").split(",") if name]
    assert compiled
    assert len(compiled) == len(set(compiled)), "two ranks have compiled one kernel"
    assert [job.told(f"empty-late-{rank}") for rank in range(N_RANKS)] == ["0"] * N_RANKS
    assert [job.told(f"warm-compiled-{rank}") for rank in range(N_RANKS)] == [""] * N_RANKS
    assert all(job.told(f"warm-loaded-{rank}") != "0" for rank in range(N_RANKS))
