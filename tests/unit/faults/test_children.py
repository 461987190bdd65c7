"""Processes that a rank starts or forks: they are not ranks and harm no rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

# mpi4py is loaded first, as in the programs of users: MPI would be initialized before this library could prevent it.
GUARDED = """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from mpi4py import MPI
import numpy as np
import mpicomp
from mpicomp.algorithms import Marsit

def attempt(number):
    try:
        mpicomp.Communicator()
    except RuntimeError as error:
        return number, MPI.Is_initialized(), type(error).__name__, str(error)

def forked():
    os._exit(attempt(0)[2] != "NotARank")

if __name__ == "__main__":
    comm = mpicomp.Communicator(timeout=60)
    aggregator = Marsit(10).start(comm, 1000)
    handle = aggregator.begin(np.ones(1000, np.float32))  # in flight while processes start
    for method in "spawn", "forkserver":
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            found = pool.map(attempt, range(2))
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found += pool.map(attempt, range(2))
        for number, initialized, kind, text in found:
            assert (initialized, kind) == (False, "NotARank"), (method, kind, text)
            assert f"was started by rank {comm.rank} of 2 and is no rank" in text, text
    forking = multiprocessing.get_context("fork").Process(target=forked)
    forking.start()
    forking.join()
    assert forking.exitcode == 0
    alone = "import mpicomp; comm = mpicomp.Communicator(OPTIONS); print(comm.allreduce(comm.size))"
    for options, environment in ("alone=True", {}), ("", {"MPICOMP_ALONE": "1"}):
        program, environment = alone.replace("OPTIONS", options), os.environ | environment
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert ended.stdout.split()[-1:] == ["1"], ended
    ended = subprocess.run([sys.executable, "-c", alone.replace("OPTIONS", "")], capture_output=True, text=True)
    assert ended.returncode == 1 and "MPICOMP_ALONE=1" in ended.stderr, ended
    nested = "import mpicomp; print('nested', mpicomp.Communicator().allreduce(1))"
    ended = subprocess.run(["mpirun", "-n", "2", sys.executable, "-c", nested], capture_output=True, text=True)
    assert ended.stdout.split() == ["nested", "2"] * 2, ended
    assert (handle.wait() == 1).all()
    comm.close()
    print("done", flush=True)
"""


def test_no_process_that_a_rank_starts_takes_its_place(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(GUARDED)
    status, output = jobs.start(2, [str(tmp_path / "program.py")]).finish()
    assert status == 0, output
    assert output.count("done") == 2, output


LOADING = """
import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, TensorDataset
import mpicomp

def attempt(index, found):
    try:
        mpicomp.Communicator()
    except RuntimeError as error:
        found.put(type(error).__name__)

if __name__ == "__main__":
    comm = mpicomp.Communicator(timeout=60)
    data = TensorDataset(torch.arange(4.0))
    # each rank has workers of another kind: every one imports PyTorch
    options = {"multiprocessing_context": ("spawn", "forkserver")[comm.rank], "persistent_workers": True}
    loader = DataLoader(data, batch_size=2, num_workers=1, **options)
    sums = [sum(float(comm.allreduce(batch).sum()) for batch, in loader) for epoch in range(2)]
    assert sums == [12.0, 12.0], sums
    if comm.rank == 1:
        found = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(attempt, (found,), nprocs=1)
        assert found.get() == "NotARank"
    comm.close()
    print("done", flush=True)
"""


def test_workers_of_pytorch_load_data_for_ranks(jobs: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(LOADING)
    status, output = jobs.start(2, [str(tmp_path / "program.py")]).finish()
    assert status == 0, output
    assert output.count("done") == 2, output


UNGUARDED = {
    "Process": "process = context.Process(target=print)\nprocess.start()\nprocess.join()\nassert process.exitcode == 1",
    "Pool": "context.Pool(1).map(abs, [1])",
    "ProcessPoolExecutor": """
from concurrent.futures import ProcessPoolExecutor
ProcessPoolExecutor(1, mp_context=context).submit(abs, 1).result()""",
}


@pytest.mark.parametrize(("way", "method"), [*((way, "spawn") for way in UNGUARDED), ("Pool", "forkserver")])
def test_a_program_that_its_workers_cannot_import_ends_with_the_reason(jobs: Jobs, way: str, method: str) -> None:
    program = f"""
import multiprocessing
context = multiprocessing.get_context({method!r})
comm = mpicomp.Communicator(timeout=NEVER_S)
if comm.rank == 1:
    exec({UNGUARDED[way]!r})
    raise SystemExit(0)
comm.barrier()
"""
    status, output = jobs.run(2, program).finish()
    assert status != 0
    assert re.search("NotARank: process .* was started by rank 1 of 2 and is no rank itself", output), output


FORKING = """
comm = mpicomp.Communicator(timeout=60)
aggregator = mpicomp.Marsit(10).start(comm, 1000)
x = np.ones(1000, np.float32)
aggregator.aggregate(x)
if comm.rank == 1:
    time.sleep(0.5)  # so that the call of rank 0 is in flight when it forks
handle = aggregator.begin(x)
if comm.rank == 0:
    child = os.fork()
    if child == 0:
        errors = []
        for call in handle.wait, lambda: aggregator.aggregate(x), comm.barrier:
            try:
                call()
            except mpicomp.CommunicatorClosed as error:
                errors.append(str(error))
        tell("errors", "|".join(errors))
        LEAVE
    tell("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
handle.wait()
comm.barrier()
tell(f"done-{comm.rank}")
"""
DRIVEN = FORKING.replace("aggregator =", "assert comm.start_progress_thread()\naggregator =", 1)
LEAVES = {"sys.exit(3)": 3, "sys.exit()": 0, "raise ValueError('of the child')": 1, "sys.exit('why')": 1}


@pytest.mark.parametrize(("program", "leave"), [*((FORKING, leave) for leave in LEAVES), (DRIVEN, "sys.exit(3)")])
def test_a_forked_child_cannot_communicate_and_its_exit_harms_neither_itself_nor_the_job(
    jobs: Jobs, program: str, leave: str
) -> None:
    job = jobs.run(2, program.replace("LEAVE", leave))
    status, output = job.finish()
    assert status == 0, output
    assert job.told("status") == str(LEAVES[leave])
    errors = job.told("errors").split("|")
    assert len(errors) == 3
    assert all("forked from a rank" in error for error in errors)
    assert job.told("done-0") == job.told("done-1") == ""
