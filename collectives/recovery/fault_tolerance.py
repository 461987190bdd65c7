"""Fault tolerance of the MPI library: whether a rank can outlive others, and which errors report a death."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TypeVar

from mpi4py import MPI

from collectives.arrays.peer_memory import UnreadableMemory
from collectives.errors import DamagedMessage, PeerFailure, RanksLost
from collectives.progress.polling import SLEEP_S, Backoff, Limits
from collectives.quoting import list_ranks

ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by Open MPI's launcher with `--with-ft ulfm`
CURE = "start the job by `mpirun --with-ft ulfm` of Open MPI 5 or later"
ADVICE = ": see its output, and start again from the last checkpoint"
LONGEST_NOTICE_S = 5.0  # from a death until MPI reports it: 10 to 20 ms on an idle node, over a second on a busy one
CHECK_S = 0.02  # between two checks for the timeout of a thread that waits in MPI, whose cores others may need
_Made = TypeVar("_Made")
_launcher = 0  # process that has started this rank
_DEATH = tuple(getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"))


def is_tolerant(comm: MPI.Comm) -> bool:
    """Return True if ranks of this communicator outlive others."""
    global _launcher
    if not isinstance(comm, MPI.Comm) or os.environ.get(ENABLED) != "1":
        return False
    with suppress(MPI.Exception, NotImplementedError, AttributeError):
        comm.Is_revoked()
        _launcher = _launcher or os.getppid()
        return True
    return False


def _may_be_noticed() -> bool:
    """Return True while the launcher runs, or its daemon here, which reports the deaths of ranks to the others."""
    return os.getppid() == _launcher


def is_tolerant_job() -> bool:
    """Return True if the launcher lets ranks outlive others, and so does not end them after a death."""
    return os.environ.get(ENABLED) == "1" and MPI.Is_initialized() and not MPI.Is_finalized()


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of a communicator that MPI reports as failed, in order."""
    with suppress(MPI.Exception, NotImplementedError, AttributeError):
        return sorted(MPI.Group.Translate_ranks(comm.Get_failed(), None, comm.Get_group()))
    return []


def describe_failed(comm: MPI.Comm, wait_s: float = 0.0, but: Collection[int] = ()) -> str:
    """Return a text with the failed ranks, such as "rank 1"; empty if MPI reports no failure.

    A group may lack the dead rank, which then has its number in COMM_WORLD; `but` are those that do not count. The
    report may come later than the first error: `wait_s` are the seconds to wait for it.
    """
    deadline = time.perf_counter() + wait_s
    while True:
        if failed := failed_ranks(comm):
            return list_ranks(failed)
        if failed := [rank for rank in failed_ranks(MPI.COMM_WORLD) if rank not in but]:
            return f"{list_ranks(failed)} of COMM_WORLD"
        if time.perf_counter() >= deadline or not _may_be_noticed():
            return ""
        with suppress(MPI.Exception):
            look(MPI.COMM_WORLD)  # MPI takes notice of a death while it makes progress
        time.sleep(SLEEP_S)


def revoke(comm: MPI.Comm) -> None:
    """Let all requests of a communicator fail on all of its ranks, also on those that wait for a living one."""
    with suppress(MPI.Exception, NotImplementedError, AttributeError):
        comm.Revoke()


def finalize_without_launcher() -> None:
    """Let MPI_Finalize meet the other ranks by messages alone, all ranks or none: deaths do not keep these waiting.

    It waits at a barrier of the launcher too. Open MPI 5.0.11's launcher loses a rank that dies there if it collects
    the process before it sees the connection end: the others stayed in 10 of 40 jobs on busy cores, and in 0 of 40
    without that barrier. OMPI_MCA_async_mpi_finalize=1, read by MPI_Init, sets the same variable.
    """
    with suppress(OSError, ValueError):  # another release may have no such variable
        ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize").value = True


@contextmanager
def reporting_deaths(comm: MPI.Comm, during: str, but: Collection[int] = ()) -> Iterator[None]:
    """Turn MPI's errors due to a death within the block into a `PeerFailure` that names the rank, on all ranks.

    `but` are the ranks of COMM_WORLD that had died before.
    """
    try:
        yield
    except (MPI.Exception, PeerFailure) as error:
        if not is_tolerant(comm) or not reports_death(error, comm):
            raise
        revoke(comm)
        dead = describe_failed(comm, LONGEST_NOTICE_S, but) or "a rank"
        raise PeerFailure(f"rank {comm.rank} of {comm.size}: {dead} died {during}{ADVICE}") from error


def reports_death(error: BaseException | None, comm: MPI.Comm) -> bool:
    """Return True if an error of MPI, or its cause, is due to the death of a rank or to the revocation after it."""
    while error is not None and not isinstance(error, MPI.Exception):
        if isinstance(error, UnreadableMemory):
            return await_death(comm)
        error = None if error.__cause__ is error else error.__cause__
    if error is None:
        return False
    if error.Get_error_class() in _DEATH:
        return True
    # a collective of MPI reports an internal error in place of the death
    return is_revoked(comm) or bool(failed_ranks(comm))


def is_revoked(comm: MPI.Comm) -> bool:
    """Return True if a rank has revoked the communicator."""
    with suppress(MPI.Exception, NotImplementedError, AttributeError):
        return bool(comm.Is_revoked())
    return False


def look(comm: MPI.Comm) -> None:
    """Raise the error of MPI if a rank is known to have died, or the communicator is revoked; makes MPI progress."""
    comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def may_repeat(error: BaseException, comm: MPI.Comm, damages: list[str]) -> bool:
    """Return True for an error behind which the ranks exchange their reports again: a death, or a damaged message.

    The text of the latter is added to `damages`, which belong into this rank's next report. A rank has one such try:
    its memory may damage every message.
    """
    if isinstance(error, DamagedMessage):
        damages.append(str(error))
        return len(damages) == 1
    return reports_death(error, comm)


def await_death(comm: MPI.Comm, meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Wait a moment for MPI's notice of a death that other evidence shows; returns whether it has come.

    `meanwhile` receives messages: those that are not received keep MPI from making progress in `look`.
    """
    deadline = time.monotonic() + LONGEST_NOTICE_S
    while time.monotonic() < deadline and _may_be_noticed():
        try:
            look(comm)
        except MPI.Exception:
            return True
        if failed_ranks(comm):  # a message that has arrived hides the error from a probe
            return True
        meanwhile()
        time.sleep(SLEEP_S)
    return False


def agree(comm: MPI.Comm, flag: bool) -> bool:
    """Return True, on all survivors or on none, if all ranks are alive and pass True; also after a revocation."""
    try:
        return bool(comm.Agree(int(flag)))
    except MPI.Exception:  # on all survivors alike: a rank has died
        return False


def repeat_after_deaths(make: Callable[[], _Made]) -> _Made:
    """Return the result of `make`, which the survivors call again where a rank dies in it; collective.

    For calls of the library that raise `RanksLost`, where the survivors need nothing of the dead rank.
    """
    while True:
        with suppress(RanksLost):
            return make()


def with_survivors(make: Callable[[], _Made], timeout_s: float, describe: Callable[[], str]) -> _Made:
    """Return the result of a call of MPI that blocks until the last survivor has come.

    A thread makes the call, so that this one can give up.

    Raises
    ------
    CollectiveTimeout
        A survivor has not come for the timeout. The thread stays in MPI, so the program must end.
    """
    made: list[_Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failed.append(error)

    thread = Thread(target=run, name="mpicomp: survivors", daemon=True)
    thread.start()
    backoff = Backoff(Limits(timeout_s), describe)
    while thread.is_alive():
        thread.join(CHECK_S)
        backoff.idle(rest=False)  # other calls of this thread wait: some are those that the survivors make again
    if failed:
        raise failed[0]
    return made[0]
