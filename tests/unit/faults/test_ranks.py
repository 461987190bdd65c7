"""A rank that stops, dies, fails or is interrupted: the job ends, with the cause and its place."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

# Three ranks on a ring, one of which stops itself before its third sum. Whoever gives up says so before one of them
# ends the job for all.
STOPPED = """
comm = mpicomp.Communicator(topology="ring", timeout=3, arrival_timeout=60, verify=VERIFY)
comm.arrival_timeout = 3  # from now on: the imports of one rank may take longer than those of the others
tell(f"pid-{comm.rank}", os.getpid())
x = np.ones(1000, np.float32)
for call in range(1, 5):
    if call == 3 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if call == 3 and comm.rank == 2 and VERIFY:
        time.sleep(1)  # late, so that it is still patient when rank 0 gives up
    try:
        comm.allreduce(x)
    except mpicomp.CollectiveTimeout as error:
        tell(f"error-{comm.rank}", error)
        while not all((FOLDER / f"error-{rank}").exists() for rank in (0, 2)):
            time.sleep(0.01)
        raise
"""


def test_a_stopped_rank_is_noticed_by_all_others_and_the_job_ends(jobs: Jobs) -> None:
    job = jobs.run(3, STOPPED, VERIFY=True)
    stopped = job.pid(1)
    status, output = job.finish()
    assert status != 0
    for rank in (0, 2):
        assert re.match(
            rf"rank {rank} of 3: not all ranks have come to call 3, allreduce\(sum\) of float32\[1000\].* "
            r"\(look for one that stopped or took another branch\) after [\d.]+ s"
            r"(, and another rank has given up)?; no answer from rank 1$",
            job.told(f"error-{rank}"),
        )
    assert re.search(r"rank [02] of 3: ending the job", output), output
    job.await_end(stopped)  # the launcher ends it with the others


def test_in_the_middle_of_a_collective_peer_step_and_chunk_are_named(jobs: Jobs) -> None:
    job = jobs.run(3, STOPPED, VERIFY=False)
    status, _ = job.finish()
    assert status != 0
    missing = r"rank {} of 3, step \d: nothing from rank {} for chunk \d \(.*\) after [\d.]+ s"
    assert re.match(missing.format(2, 1), job.told("error-2"))
    # MPI may keep messages that it cannot deliver, or not: rank 0 then waits for a message that rank 2 would send on
    untaken = r"rank 0 of 3, step \d: rank 1 does not take chunk \d after [\d.]+ s"
    assert re.match(f"{untaken}|{missing.format(0, 2)}", job.told("error-0"))


def test_a_killed_rank_ends_the_job(jobs: Jobs) -> None:
    job = jobs.run(
        2,
        """
        comm = mpicomp.Communicator(timeout=NEVER_S)
        aggregator = mpicomp.Marsit().start(comm, 1000)
        tell(f"pid-{comm.rank}", os.getpid())
        while True:
            aggregator.aggregate(np.ones(1000, np.float32))
        """,
    )
    os.kill(job.pid(1), signal.SIGKILL)
    status, output = job.finish()
    assert status != 0
    assert "signal 9" in output, output


FAILURES = {
    "of a rank": "raise RuntimeError('the disk is on fire')",
    "in a thread": """
    def fail():
        raise RuntimeError("the disk is on fire")
    import threading
    threading.Thread(target=fail).start()""",
    "where torch.distributed wraps the hook": """
    import torch.distributed
    store = torch.distributed.FileStore(str(FOLDER / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    raise RuntimeError("the disk is on fire")""",
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_an_exception_on_one_rank_ends_the_job_and_names_the_rank(jobs: Jobs, failure: str) -> None:
    if "torch" in failure:
        pytest.importorskip("torch")
    program = """
comm = mpicomp.Communicator(timeout=NEVER_S)
if comm.rank == 1:
    FAILURE
while True:
    comm.rank == 2 or comm.barrier()  # rank 2 is stuck elsewhere
"""
    status, output = jobs.run(3, program.replace("FAILURE", failure)).finish()
    assert status != 0
    assert output.count("Traceback") == 1
    # mpirun's own words may come between these two, and its line breaks behind a word of the rank's
    cause, end = "RuntimeError: the disk is on fire", "rank 1 of 3: ending the job"
    assert 0 <= output.find(cause) < output.find(end), output


@pytest.mark.parametrize(("leave", "left"), [("sys.exit(3)", 3), ("exit('no such file')", 1)])
def test_a_status_other_than_0_of_one_rank_ends_the_job(jobs: Jobs, leave: str, left: int) -> None:
    program = """
comm = mpicomp.Communicator(timeout=NEVER_S)
if comm.rank == 1:
    try:
        sys.exit(5)
    except SystemExit:
        pass  # it is the last one that counts
    with comm:
        LEAVE
time.sleep(NEVER_S)  # in no call, so that the rank is not missed
"""
    status, output = jobs.run(3, program.replace("LEAVE", leave)).finish()
    assert status == left
    assert f"rank 1 of 3: the program ends with status {left}, ending the job" in output, output


@pytest.mark.parametrize("wait", ["comm.barrier()", "threading.Thread(target=comm.barrier).start()"])
def test_a_status_other_than_0_is_the_jobs_though_others_wait_in_a_call(jobs: Jobs, wait: str) -> None:
    program = f"""
    import threading
    comm = mpicomp.Communicator(timeout=NEVER_S)
    comm.barrier()
    if comm.rank == 1:
        sys.exit(7)
    {wait}
    """
    status, output = jobs.run(2, program).finish()
    assert status == 7, output


def test_a_caught_exit_and_a_status_of_0_end_nothing(jobs: Jobs) -> None:
    program = """
    comm = mpicomp.Communicator()
    if comm.rank == 1:
        try:
            sys.exit(5)
        except SystemExit:
            sys.exit(0)
    time.sleep(0.5)
    """
    status, output = jobs.run(2, program).finish()
    assert status == 0, output


def test_a_rank_whose_program_has_ended_is_not_waited_for(jobs: Jobs) -> None:
    program = """
    comm = mpicomp.Communicator(arrival_timeout=NEVER_S)
    for call in range(3 - (comm.rank == 1)):
        comm.barrier()
    """
    status, output = jobs.run(3, program).finish()
    assert status != 0
    assert re.search(
        r"rank [02] of 3: not all ranks have come to call 3, barrier\(\).*: rank 1 left by an exception or at the end",
        output,
    )


def test_the_error_of_a_wrong_argument_shows_few_lines_and_only_the_programs(jobs: Jobs) -> None:
    program = """
    comm = mpicomp.Communicator()
    aggregator = mpicomp.Marsit().start(comm, 1000)
    def train():
        aggregator.aggregate(np.ones(1000))
    train()
    """
    told = r"TypeError: rank \d of 2, vector 0: the vector has type float64, the aggregator was started for float32: .*"
    output = jobs.run(2, program).finish()[1]  # the launcher's own words may come anywhere
    assert re.search(told, output, re.MULTILINE), output
    shown = re.findall(r'File "(.*)", line', output)
    assert {Path(name).name for name in shown} == {"program.py"}
    assert len(shown) <= 2 * 2


LIMITS = "timeout=1.5, arrival_timeout=60"


@pytest.mark.parametrize(
    "keeping", [f"with mpicomp.Communicator({LIMITS}) as comm:", f"if comm := mpicomp.Communicator({LIMITS}):"]
)
def test_a_call_left_under_way_by_an_exception_does_no_harm_to_memory(jobs: Jobs, keeping: str) -> None:
    job = jobs.run(
        2,
        f"""
        import gc
        def train():
            {keeping}
                rank = comm.rank
                comm.allreduce(np.ones(4))
                comm.arrival_timeout = 1.5
                if rank == 0:
                    handle = comm.iallreduce(np.ones(30000))
                    raise OSError("a file is missing")
                time.sleep(0.5)
                comm.allreduce(np.ones(30000))
        try:
            train()
        except (OSError, mpicomp.CollectiveError) as error:
            print(type(error).__name__, flush=True)
        gc.collect()
        """,
    )
    _, output = job.finish()
    assert "OSError" in output
    assert re.search("Collective(Timeout|Mismatch)", output), output
    assert "signal" not in output.lower(), output


# Rank 0 waits for rank 1, which comes when the test says so.
WAITING = """
comm = mpicomp.Communicator(topology="ring", timeout=NEVER_S, verify=VERIFY)
signal.signal(signal.SIGUSR1, lambda number, frame: tell(f"handled-{comm.rank}"))
tell(f"pid-{comm.rank}", os.getpid())
while comm.rank == 1 and not (FOLDER / "go").exists():
    time.sleep(0.01)
tell(f"sum-{comm.rank}", comm.allreduce(np.ones(1000, np.float32))[0])
"""


def test_ctrl_c_ends_a_job_whose_ranks_wait(jobs: Jobs) -> None:
    job = jobs.run(2, WAITING, VERIFY=True)
    pids = [job.pid(rank) for rank in range(2)]
    job.process.send_signal(signal.SIGINT)
    status, _ = job.finish()
    assert status != 0
    for pid in pids:
        job.await_end(pid)


@pytest.mark.parametrize("verify", [True, False])
def test_signal_handlers_run_while_a_rank_waits_and_it_goes_on(jobs: Jobs, verify: bool) -> None:
    job = jobs.run(2, WAITING, VERIFY=verify)
    os.kill(job.pid(0), signal.SIGUSR1)
    job.told("handled-0")
    (job.folder / "go").touch()
    status, output = job.finish()
    assert status == 0, output
    assert [job.told(f"sum-{rank}") for rank in range(2)] == ["2.0", "2.0"]


def test_an_interrupt_of_one_rank_that_waits_ends_the_job(jobs: Jobs) -> None:
    job = jobs.run(2, WAITING, VERIFY=True)
    job.pid(1)
    os.kill(job.pid(0), signal.SIGINT)
    status, output = job.finish()
    assert status != 0
    assert "KeyboardInterrupt" in output
    assert "rank 0 of 2: ending the job" in output, output
