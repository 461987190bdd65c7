"""End of a launcher that goes on after its job.

Beyond a link that is cut for ever nothing answers it. So a rank that ends a job of several nodes leaves a process
behind on its node. If the launcher, or its daemon on that node, still runs after a while, this process ends it, and the
ranks that it had started there. The process runs this very file, without any package.

Where several ranks of a tolerant job end at once, the launcher of Open MPI 5.0.11 may wait for a lock that its own
thread holds: in 2 of 100 jobs of six ranks on a busy machine. So the witness becomes such a process once all ranks have
ended. It ends a launcher that has no child and has waited for a lock all the time. Others wait for a program that has
the output of a rank, or for the reader of their own output.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PATIENCE_S, SETTING = 30.0, "MPICOMP_END_LAUNCHER_AFTER"
OF_LOST_JOB, OF_ENDED_RANKS = "lost", "ended"  # kinds of processes
TERM_S = 5.0  # between SIGTERM and SIGKILL
POLL_S = 2.0  # between looks at the children of a launcher
# Launchers of one job and their daemons, of at most 15 letters, which Linux keeps. Slurm's daemon has other jobs too.
LAUNCHERS = ("mpirun", "prterun", "orterun", "mpiexec", "mpiexec.hydra")
MPICH_PROXY = ("hydra_pmi_proxy",)  # starts all ranks of its node
_DAEMONS = ("prted", "orted", *MPICH_PROXY)
_STATE, _PARENT = 0, 1  # fields of /proc/PID/stat behind the name
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_OF_MANY_JOBS = "prte-"  # beginning of the name of a job whose daemons outlive it


def watch_launcher(n_ranks: int) -> None:
    """Leave a process that ends this node's launcher or daemon if that has not ended by itself after a while.

    Nothing is done on a node that has all ranks of the job, of which there are `n_ranks`. The environment's
    MPICOMP_END_LAUNCHER_AFTER has the seconds, by default 30; 0: never.
    """
    patience, launchers = patience_s(), [*_launchers()]
    here = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "")
    if not patience or not launchers or here in ("", str(n_ranks)) or not hasattr(os, "pidfd_open"):
        return
    # OSError: another rank of this node has come first. No other error may keep the job from ending.
    with suppress(Exception), Path(f"/proc/{launchers[0]}/environ").open("rb") as claim:
        # no other user can open this file, and so none can hold its lock to keep the process away
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ends = [os.pidfd_open(pid) for pid in launchers]
        given = zip(launchers, ends, strict=True)
        # The launcher reads the streams of its ranks to their end, so this process must not have them.
        subprocess.Popen(
            command(patience, OF_LOST_JOB, given), cwd="/", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(claim.fileno(), *ends),
        )  # fmt: skip


def own_launcher(names: Container[str]) -> int:
    """Return the process of the job's launcher or daemon that has started this rank; 0 if `names` lacks its name."""
    pid = next(_launchers(), 0)
    return pid if pid and Path(f"/proc/{pid}/comm").read_text().strip() in names else 0


def command(patience: float, kind: str, launchers: Iterable[tuple[int, int]]) -> list[str]:
    """Return the command of the process, for launchers that are given as pairs of process and pidfd."""
    given = [f"{pid}:{end}" for pid, end in launchers]
    return [sys.executable, "-I", "-S", __file__, str(patience), kind, *given]


def patience_s() -> float:
    """Return the seconds after which a launcher is ended; 0: never."""
    try:
        return max(0.0, float(os.environ.get(SETTING, PATIENCE_S)))
    except ValueError:
        return PATIENCE_S


def _launchers() -> Iterator[int]:
    """Yield the processes above this one that have started this job and no other, the nearest first."""
    if os.environ.get("PMIX_NAMESPACE", "").startswith(_OF_MANY_JOBS):
        return
    pid = os.getppid()
    with suppress(OSError, ValueError):
        while (name := Path(f"/proc/{pid}/comm").read_text().strip()) in (*_DAEMONS, *LAUNCHERS):
            yield pid
            if name in LAUNCHERS:  # another one above has started this one as its job
                return
            pid = int(_status(pid)[_PARENT])


def _status(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# The process that is left behind --------------------------------------------------------------------------------------


def _main(patience: float, kind: str, given: Iterable[str]) -> None:
    pids = {int(end): int(pid) for pid, _, end in (one.partition(":") for one in given)}
    left = _wait_for_locked(pids, patience) if kind == OF_ENDED_RANKS else _wait([*pids], patience)
    if not left:
        return
    ranks = []
    for pid in _children({pids[end] for end in left}):
        with suppress(OSError):  # it has ended
            ranks.append(os.pidfd_open(pid))
    _signal(left, signal.SIGTERM)
    _signal(_wait([*left, *ranks], TERM_S), signal.SIGKILL)


def _wait_for_locked(pids: Mapping[int, int], seconds: float) -> list[int]:
    """Wait until processes have ended, or have all waited for a lock, without children, for so long; return these."""
    left, since = [*pids], time.monotonic()
    while left and time.monotonic() - since < seconds:
        left = _wait(left, POLL_S)
        if any(_children({*pids.values()})) or not all(_is_locked(pids[end]) for end in left):
            since = time.monotonic()
    return left


def _is_locked(pid: int) -> bool:
    """Return True if the main thread waits for a lock; one that serves events waits for these."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().startswith("futex")
    return False


def _wait(ends: list[int], seconds: float) -> list[int]:
    """Wait until processes have ended; return those that are left."""
    deadline, poll = time.monotonic() + seconds, select.poll()
    left = set(ends)
    for end in ends:
        poll.register(end, select.POLLIN)
    while left and (rest := deadline - time.monotonic()) > 0:
        for end, _ in poll.poll(1e3 * rest):
            poll.unregister(end)
            left.remove(end)
    return [end for end in ends if end in left]


def _children(pids: Container[int]) -> Iterator[int]:
    """Yield the processes that these have started, but for those that have ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            status = _status(int(folder.name))
            if int(status[_PARENT]) in pids and status[_STATE] != "Z" and int(folder.name) != os.getpid():
                yield int(folder.name)


def _signal(ends: Iterable[int], number: int) -> None:
    for end in ends:
        with suppress(OSError):
            signal.pidfd_send_signal(end, number)


if __name__ == "__main__":
    _main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
