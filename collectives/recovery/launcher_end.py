"""End of a launcher that goes on after its job: beyond a link that is cut for ever nothing answers it.

A rank that ends a job of several nodes leaves a process behind on its node. If the launcher, or its daemon on that
node, still runs after a while, this process ends it, and the ranks that it had started there. The process runs this
very file, without any package.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

PATIENCE_S, SETTING = 30.0, "MPICOMP_END_LAUNCHER_AFTER"
TERM_S = 5.0  # between SIGTERM and SIGKILL
# Launchers of one job and their daemons, by the first 15 letters, which Linux keeps. Slurm's daemon has other jobs too.
_OPEN_MPI = ("mpirun", "prterun", "prted", "orterun", "orted")
_MPICH = ("mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_OF_MANY_JOBS = "prte-"  # beginning of the name of a job whose daemons outlive it


def watch_launcher(n_ranks: int) -> None:
    """Let this node's part of the launcher end if it has not done so by itself after a while.

    Nothing is done on a node that has all ranks of the job, of which there are `n_ranks`. The environment's
    MPICOMP_END_LAUNCHER_AFTER has the seconds, by default 30; 0: never.
    """
    patience, launchers = _patience(), [*_launchers()]
    here = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "")
    if not patience or not launchers or here in ("", str(n_ranks)) or not hasattr(os, "pidfd_open"):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0mpicomp-launcher-{launchers[0]}")  # OSError: another rank of this node has come first
        ends = [os.pidfd_open(pid) for pid in launchers]
        given = [f"{pid}:{end}" for pid, end in zip(launchers, ends, strict=True)]
        # The launcher reads the streams of its ranks to their end, so this process must not have them.
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(patience), *given], cwd="/", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(claim.fileno(), *ends),
        )  # fmt: skip


def _patience() -> float:
    try:
        return max(0.0, float(os.environ.get(SETTING, PATIENCE_S)))
    except ValueError:
        return PATIENCE_S


def _launchers() -> Iterator[int]:
    """Yield the processes above this one that have started this job and no other, the nearest first."""
    names = {name[:15] for name in (*_OPEN_MPI, *_MPICH)}
    if os.environ.get("PMIX_NAMESPACE", "").startswith(_OF_MANY_JOBS):
        return
    pid = os.getppid()
    with suppress(OSError, ValueError):
        while Path(f"/proc/{pid}/comm").read_text().strip() in names:
            yield pid
            pid = _parent(pid)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# The process that is left behind --------------------------------------------------------------------------------------


def _main(patience: float, given: Iterable[str]) -> None:
    pairs = [one.split(":") for one in given]
    left = _wait([int(end) for _, end in pairs], patience)
    if not left:
        return
    ranks = [*_children({int(pid) for pid, _ in pairs})]
    _signal(left, signal.SIGTERM)
    _signal(_wait([*left, *ranks], TERM_S), signal.SIGKILL)


def _wait(ends: list[int], seconds: float) -> list[int]:
    """Wait until processes have ended; return those that are left."""
    deadline = time.monotonic() + seconds
    while ends and (rest := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(ends, (), (), rest)
        ends = [end for end in ends if end not in ended]
    return ends


def _children(pids: Container[int]) -> Iterator[int]:
    """Yield file descriptors of the processes that these have started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if _parent(int(folder.name)) in pids:
                yield os.pidfd_open(int(folder.name))


def _signal(ends: Iterable[int], number: int) -> None:
    for end in ends:
        with suppress(OSError):
            signal.pidfd_send_signal(end, number)


if __name__ == "__main__":
    _main(float(sys.argv[1]), sys.argv[2:])
