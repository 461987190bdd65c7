"""The launcher ends with a failure if all ranks die, and with the ranks' own status if one of them ends by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives.recovery import witness_process
from collectives.recovery.launcher_end import POLL_S
from tests.unit.faults.jobs import JOB_S, Jobs

pytestmark = pytest.mark.timeout(2 * JOB_S)

ENDS = """
import contextlib
from mpi4py.MPI import Finalize as finalize
me = int(os.environ["OMPI_COMM_WORLD_RANK"])
mpicomp.install_abort_hook()
def witness():  # has the standard output of rank 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"witness_process" in (process / "cmdline").read_bytes():
                if os.readlink(process / "fd" / "1") == os.readlink("/proc/self/fd/1"):
                    return process.name
comm = mpicomp.Communicator(on_failure=MODE, timeout=60)
if me == 0:
    tell("witness", witness())
comm.barrier()
if END == "all at once":
    os.kill(os.getpid(), signal.SIGKILL)
if END == "one by one":
    for rank in range(comm.size):
        if me == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
if END == "with children" and os.fork() == 0:  # which have all that the rank has open
    os.closerange(0, 3)
    tell(f"pid-{me}", os.getpid())
    time.sleep(NEVER_S)
if END == "with children":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if END == "but one" and me == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if END == "os._exit":
    os._exit(0)
if END == "sys.exit":
    sys.exit(75)
if END == "Finalize":
    finalize()
    sys.exit()
comm.barrier()
"""


STOPPED = """
comm = mpicomp.Communicator(on_failure=MODE, timeout=60)
comm.barrier()
if comm.rank == 0:
    tell("launcher", os.getppid())
    os.kill(os.getppid(), signal.SIGSTOP)
comm.barrier()
time.sleep(2)  # all ranks have left the barrier
os._exit(STATUS)
"""
WRITES = """
import subprocess
comm = mpicomp.Communicator(on_failure="regroup", timeout=60)
comm.barrier()
if comm.rank == 0:
    subprocess.Popen(["sh", "-c", "sleep 6; echo uploaded"])
"""


def watchers(launcher: str) -> list[str]:
    """Return the processes that end a launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_text().split("\0")
            found += [path.parent.name for one in words if "ended" in words and one.partition(":")[0] == launcher]
    return found


def finish(jobs: Jobs, n_ranks: int, end: str, mode: str = "regroup") -> tuple[int, str]:
    job = jobs.run_tolerant(n_ranks, ENDS, MODE=mode, END=end)
    status, output = job.finish()
    job.await_end(int(job.told("witness")))
    return status, output


@pytest.mark.parametrize(
    ("n_ranks", "end", "mode"),
    [
        (1, "all at once", "regroup"),
        (1, "all at once", "raise"),
        (3, "all at once", "regroup"),
        (5, "all at once", "raise"),
        (3, "one by one", "regroup"),
    ],
)
def test_a_job_fails_if_all_ranks_die(jobs: Jobs, n_ranks: int, end: str, mode: str) -> None:
    status, output = finish(jobs, n_ranks, end, mode)
    assert status == 1, output
    text = f"all {n_ranks} ranks have died" if n_ranks > 1 else "the only rank has died"
    assert output.count(text) == 1


def test_a_job_fails_if_all_ranks_die_though_their_children_live(jobs: Jobs) -> None:
    status, output = finish(jobs, 2, "with children")
    assert status == 1, output
    children = [Path("/proc", path.read_text(), "exe") for path in jobs.folder.glob("pid-*")]
    assert [child.exists() for child in children] == [True, True]


@pytest.mark.parametrize(
    ("n_ranks", "end", "expected"),
    [(2, "none", 0), (2, "but one", 0), (2, "os._exit", 0), (2, "Finalize", 0), (1, "sys.exit", 75)],
)
def test_a_job_in_which_a_rank_ends_by_itself_has_its_status(jobs: Jobs, n_ranks: int, end: str, expected: int) -> None:
    status, output = finish(jobs, n_ranks, end)
    assert status == expected, output
    assert "the job ends with status" not in output


@pytest.mark.parametrize(("mode", "status"), [("regroup", 0), ("raise", 3)])
def test_a_launcher_whose_ranks_have_ended_is_watched_and_keeps_their_status(
    jobs: Jobs, mode: str, status: int
) -> None:
    job = jobs.run_tolerant(3, STOPPED, {"MPICOMP_END_LAUNCHER_AFTER": "1"}, MODE=mode, STATUS=status)
    launcher = job.told("launcher")
    job.wait_for(lambda: bool(watchers(launcher)), "a process that watches the launcher")
    (watcher,) = watchers(launcher)
    time.sleep(2 * POLL_S + 1)  # it waits for no lock
    os.kill(int(launcher), signal.SIGCONT)
    assert job.finish()[0] == status, job.output
    job.await_end(int(watcher))


def test_a_launcher_that_waits_for_a_program_of_a_rank_goes_on(jobs: Jobs) -> None:
    job = jobs.run_tolerant(2, WRITES, {"MPICOMP_END_LAUNCHER_AFTER": "1"})
    assert job.finish() == (0, "uploaded\n")


def test_a_connection_that_its_rank_gave_up_is_no_death() -> None:
    launcher, server = subprocess.Popen(["sleep", "100"]), socket.create_server(("127.0.0.1", 0))
    end, token = os.pidfd_open(launcher.pid), bytes(range(witness_process.TOKEN_BYTES))
    numbers = map(str, (server.fileno(), end, 1, 1))
    witness = subprocess.Popen(
        [sys.executable, "-IS", witness_process.__file__, *numbers],
        stdin=subprocess.PIPE,
        pass_fds=(server.fileno(), end),
    )
    assert witness.stdin is not None
    witness.stdin.write(token)
    witness.stdin.flush()

    def connect() -> socket.socket:
        found = socket.create_connection(server.getsockname(), JOB_S)
        found.sendall(token + b"rank 0 of 1")
        assert found.recv(len(token)) == token
        return found

    connect().close()
    rank = connect()
    rank.sendall(witness_process.CONFIRMS)
    witness.stdin.write(witness_process.KEPT)
    witness.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(1)
    rank.close()
    assert launcher.wait(JOB_S) == -signal.SIGTERM
    assert witness.wait(JOB_S) == 0
    witness.stdin.close()
    os.close(end)
    server.close()
