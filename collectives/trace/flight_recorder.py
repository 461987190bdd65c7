"""Flight recorder: the newest calls of a rank, always kept, and written to a file when a call fails or a signal comes.

`Calls` adds a record when a call begins, and sets its times when the ranks have compared it and when it has ended. A
record keeps neither vectors nor communicators alive; calls in flight describe themselves when a file is written.
``mpicomp analyze`` reads the files of all ranks.

A record is a list that one assignment puts into place, so that a signal handler or another thread never sees half of
one. Nothing here takes a lock that the interrupted code may hold. Files are written by a thread for which the caller
waits a short time only: a folder that hangs delays no error.
"""

from __future__ import annotations

import _thread
import json
import logging
import math
import os
import re
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

from mpi4py import MPI

from collectives.atomic_file import replacing
from collectives.errors import CollectiveTimeout, PeerFailure
from collectives.launcher import parent
from collectives.quoting import one_line
from collectives.trace.flight_file import COMPARED, ENDED, ERROR, Record, content_of

if TYPE_CHECKING:
    from collectives.execution.call import Call
    from collectives.group.calls import Calls

FOLDER = "MPICOMP_FLIGHT_DIR"
MOST_RECORDS = 2000
ENDING_S = 10.0  # time after an error in which SIGTERM belongs to the end of the job
WRITING_S = 1.0  # longest wait for a file; far more than the 10 to 20 ms that writing takes

_log = logging.getLogger("collectives")
# Variables with the name of a job, by which its ranks on a host find one folder.
_JOBS = ("PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "FLUX_JOB_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_RANK_NAMES = ("PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK", "SLURM_PROCID")
_SIZE_NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS")


class RecordedGroup:
    """Communicator as the recorder knows it; it does not keep it alive."""

    def __init__(self, recorder: FlightRecorder, key: str, rank: int, members: Sequence[int], calls: Calls) -> None:
        # the key is the same on all ranks of the communicator, and for no other one; members are ranks of the job
        self.key, self.rank, self.members = key, rank, tuple(members)
        self.begun = 0  # collective calls so far
        self.add = recorder.add
        self._calls = ref(calls)
        recorder.join(self)

    def in_flight(self) -> tuple[Call, ...]:
        """Return the calls in flight."""
        calls = self._calls()
        return () if calls is None else calls.in_flight()

    def begin(self, call: Call) -> None:
        """Record that a call begins."""
        number = 0
        if not call.is_pairwise:
            number = self.begun = self.begun + 1
        call.note = record = [self, number, call.label, call.step, time.perf_counter(), 0.0, 0.0, None]
        self.add(record)

    def compare(self, call: Call) -> None:
        """Record that the ranks have compared a call."""
        if call.note is not None:
            call.note[COMPARED] = time.perf_counter()

    def end(self, call: Call) -> None:
        """Record that a call has ended."""
        record = call.note
        if record is not None:
            record[ENDED] = time.perf_counter()
            if call.error is not None:
                record[ERROR] = type(call.error).__name__

    def explain(self, error: BaseException, missing: Sequence[int] = ()) -> str:
        """Write the file after an error, and return its folder, or an empty text if no file is written."""
        # other errors have the calls of all ranks in their message: a file only if the environment names a folder
        if not isinstance(error, CollectiveTimeout | PeerFailure | MPI.Exception) and requested_folder() is None:
            return ""
        return recorder_here().write_after(error, missing, self)


class FlightRecorder:
    """Newest calls of one rank on all of its communicators; by default of this process's rank."""

    def __init__(self, rank: int | None = None, size: int | None = None) -> None:
        self.is_thread = rank is not None  # of `run_local`
        self._place = None if rank is None or size is None else (rank, size)
        self._records: deque[Record] = deque(maxlen=MOST_RECORDS)
        self.add = self._records.append
        self._groups: list[ref[RecordedGroup]] = []
        self._process = os.getpid()
        self._failed_at = -math.inf  # when the last file was written after an error

    def join(self, group: RecordedGroup) -> None:
        """Include a communicator, also before its first call and after its last record is gone."""
        self._groups = [one for one in self._groups if one() is not None] + [ref(group)]

    def forget(self) -> None:
        """Forget the calls of the parent, in a process that was forked from it."""
        self._records.clear()
        self._groups = []

    @property
    def place(self) -> tuple[int, int] | None:
        """Rank and number of ranks; None in a process that is no rank, or does not know its place yet."""
        if self._place is None and os.getpid() == self._process:
            if MPI.Is_initialized() and not MPI.Is_finalized():
                self._place = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
            elif parent() is None:  # the launcher's variables of a rank's children are those of the rank
                rank, size = (
                    next((os.environ[one] for one in names if one in os.environ), "")
                    for names in (_RANK_NAMES, _SIZE_NAMES)
                )
                return (int(rank), int(size) if size.isdecimal() else int(rank) + 1) if rank.isdecimal() else None
        return self._place if os.getpid() == self._process else None

    # Files -----------------------------------------------------------------------------------------------------------

    def write_after(self, error: BaseException, missing: Sequence[int] = (), group: RecordedGroup | None = None) -> str:
        """Write the file after an error, where files are wanted; return its folder, or an empty text. Never raises."""
        with suppress(Exception):  # an error on the way must not replace the one that is reported
            folder = folder_of_errors(self)
            if folder is not None:
                lost = [group.members[rank] for rank in missing] if group is not None else list(missing)
                problem = self._write(folder, f"{type(error).__name__}: {error}", lost)
                if not problem:
                    self._failed_at = time.perf_counter()
                    return str(folder)
                _log.warning("no flight record could be written: %s", problem)
        return ""

    def write_on_request(self, number: int) -> None:
        """Write the file if the environment names a folder; for signal handlers, so that problems are not logged."""
        with suppress(Exception):
            folder, reason = requested_folder(), signal.Signals(number).name
            # SIGTERM ends a job in which a rank has failed, and the file of the error has more to show
            has_failed = number == signal.SIGTERM and time.perf_counter() < self._failed_at + ENDING_S
            if folder is not None and not has_failed:
                problem = self._write(folder, reason, [])
                if problem:
                    os.write(2, f"no flight record could be written: {problem}\n".encode())

    def _write(self, folder: Path, reason: str, missing: list[int]) -> str:
        """Write the file; return a problem, or an empty text."""
        place = self.place
        if place is None:
            return "this process is no rank"
        path = folder / f"flight-{place[0]}.json"
        content = self.snapshot(reason, missing)
        outcome = [f"{path} is not written within {WRITING_S:g} s"]
        done = _thread.allocate_lock()
        done.acquire()

        def work() -> None:
            try:
                _make_folder(folder)
                with replacing(path, durable=False) as file:
                    file.write(json.dumps(content).encode(errors="replace"))
                outcome[0] = ""
            except Exception as error:  # noqa: BLE001 - reported, as nothing may replace the error of the call
                outcome[0] = f"{one_line(error)}; make room in {folder}, or name another (MPICOMP_FLIGHT_DIR)"
            finally:
                done.release()

        _thread.start_new_thread(work, ())  # `threading` would take a lock that the interrupted code may hold
        done.acquire(timeout=WRITING_S)
        return outcome[0]

    def snapshot(self, reason: str, missing: Sequence[int] = ()) -> dict[str, Any]:
        """Return the content of a file."""
        known = (group for one in self._groups if (group := one()) is not None)
        return content_of(self.place or (0, 1), _copy_records(self._records), known, reason, missing)


def _copy_records(records: deque[Record]) -> list[Record]:
    for _ in range(3):
        with suppress(RuntimeError):  # another thread has added a record meanwhile
            return list(records)
    return []


# Folders --------------------------------------------------------------------------------------------------------------


def requested_folder() -> Path | None:
    """Return the folder that the environment names, or None if it names no folder."""
    folder = os.environ.get(FOLDER)
    return Path(folder).absolute() if folder else None


def folder_of_errors(recorder: FlightRecorder) -> Path | None:
    """Return the folder for files after errors: the environment's, else one among temporary files; None: no files."""
    place = recorder.place
    if FOLDER in os.environ:
        return requested_folder()
    # a thread, or a rank that is alone, needs no file to be compared with others
    if recorder.is_thread or place is None or place[1] == 1:
        return None
    job = next((os.environ[one] for one in _JOBS if os.environ.get(one)), "") or str(os.getppid())
    name = re.sub(r"[^\w.-]+", "-", job)[:80]
    return Path(tempfile.gettempdir(), f"mpicomp-flight-{os.getuid()}-{name}")


def _make_folder(folder: Path) -> None:
    if FOLDER in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set {FOLDER}")


# Recorders ------------------------------------------------------------------------------------------------------------


class _Own(threading.local):
    recorder: FlightRecorder | None = None


_process, _own = FlightRecorder(), _Own()
_of_threads: list[ref[FlightRecorder]] = []


def recorder_here() -> FlightRecorder:
    """Return the recorder of the rank that the calling thread belongs to."""
    return _own.recorder or _process


@contextmanager
def recording_as(rank: int, size: int) -> Iterator[None]:
    """Record the calls of this thread separately, as those of a rank of `run_local`."""
    global _of_threads
    before, _own.recorder = _own.recorder, FlightRecorder(rank, size)
    _of_threads = [one for one in _of_threads if one() is not None] + [ref(_own.recorder)]
    try:
        yield
    finally:
        _own.recorder = before


def write_all(number: int) -> None:
    """Write the files of this process's ranks, if the environment names a folder; for signal handlers."""
    threads = [found for one in _of_threads if (found := one()) is not None]
    for recorder in threads or [_process]:
        recorder.write_on_request(number)


# Signals --------------------------------------------------------------------------------------------------------------


def install_handlers() -> None:
    """Handle SIGUSR1 and SIGTERM where the environment names a folder and the program has no handlers of its own."""
    if requested_folder() is None or threading.current_thread() is not threading.main_thread():
        return
    # SIGUSR1 writes the file, and the program goes on. SIGTERM, which launchers send to all ranks when a job is ended,
    # writes it and ends the process as before: a rank that is late leaves its file in this way alone.
    for number in (signal.SIGUSR1, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    write_all(number)
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _after_fork() -> None:
    _process.forget()
    _of_threads.clear()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        if signal.getsignal(number) == _note:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
install_handlers()
