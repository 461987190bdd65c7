"""Errors of a job of ``mpicomp run``: equal ones are printed once, the cause last, and the launcher's banners not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from select import select
from typing import BinaryIO

from collectives.error_report import START, VARIABLE, ErrorReport, parse

LOOK_S = 0.2  # between looks whether the job has ended
GATHERING_S = 1.0  # from the last report on: ranks fail at different times, and a job may hang after it
RULE = re.compile(rb"-{74,}\s*")
# Phrases of the blocks that Open MPI prints after a rank has printed its error and called MPI_Abort.
BANNERS = (b"MPI_ABORT was invoked on rank", b'calling\n"abort". This may have caused')
BEGINNINGS = (BANNERS[0], b"prterun has exited due to", b"prterun detected that", b"prterun noticed that")
# Lines of Open MPI's libraries about ranks that have just ended
NOISE = re.compile(rb"\[warn\] Epoll |\[\S+\] PMIX ERROR: PMIX_ERR_UNREACH ")
EXITED = re.compile(rb"exited with non-zero status,.*@\d+,(\d+)\].*Exit code: +(\d+)", re.DOTALL)
SIGNALLED = re.compile(rb"process rank (\d+) with PID \d+ on node \S+ exited on\s+signal (\d+)")
# Beginning and end of an error that ends Python before the hook is installed that reports it, as one of an import.
TRACED = (b"Traceback (most recent call last):", b'  File "')
UNCAUGHT = re.compile(rb"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?\s*")
USAGE = re.compile(rb"[\w. -]+: error: .*\s*")  # argparse's last line, with status 2
# Python's own line where it cannot begin a program, with status 1 or 2.
NO_PROGRAM = re.compile(rb"(?:.*/)?python[\d.]*: (?:No module named|can't (?:open|find)|Error while finding) .*\s*")
SIGNAL_CURES: Mapping[int, str] = {
    signal.SIGKILL: "the system ends processes so when memory is short: see dmesg, or start fewer ranks",
    signal.SIGTERM: "something outside of the job has ended it, such as the batch system's time limit",
}
CRASH_CURE = "PYTHONFAULTHANDLER=1 in the environment prints the line of Python that it was in"
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_PR_SET_PDEATHSIG = 1


class ErrorOutput:
    """Error output of a job on its way to `out`."""

    def __init__(self, out: BinaryIO) -> None:
        # lines go at once, but for reports, which are gathered, and blocks between two rules, as banners are
        self._out, self._rest = out, b""
        self._block: list[bytes] = []  # since a first rule
        self._banners = b""  # held back: the launcher may pass the error that they follow on after them
        self._gathered: list[ErrorReport] = []
        self._known: list[list[ErrorReport]] = []  # equal ones, in the order in which they came
        self._due = 0.0  # when those that are gathered are printed
        # of a job without reports: how a rank ended, and Python's error at the end, by the status that it brings
        self._end, self._uncaught = "", dict[int, str]()
        self._traces = False  # the lines are those of a traceback

    @property
    def waits_s(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        return max(0.0, self._due - time.monotonic()) if self._gathered or self._banners else None

    def write(self, data: bytes) -> None:
        """Take output of the job."""
        *lines, self._rest = (self._rest + data.replace(b"\0", b"")).split(b"\n")
        for line in lines:
            self._write_line(line + b"\n")
        if not self._block and START not in self._rest and self._rest.strip(b"-"):
            self._out.write(self._rest)  # a line that has no end yet, such as a progress bar
            self._rest = b""
        self._out.flush()

    def _write_line(self, line: bytes) -> None:
        before, start, _ = line.partition(START)
        report = parse(line[len(before) :].decode(errors="replace")) if start else None
        if report is not None:
            self._out.write(before)  # of a line that another rank had begun
            self._gathered.append(report)
            self._due = time.monotonic() + GATHERING_S
            return
        if NOISE.match(line):
            return
        if len(self._block) == 1 and not line.startswith(BEGINNINGS):
            self._end_block()  # a rule of the program's own
        if self._block or RULE.fullmatch(line):
            self._block.append(line)
            if len(self._block) > 1 and RULE.fullmatch(line):
                self._end_block()
        else:
            self._out.write(line)
            self._note(line)

    def _note(self, line: bytes) -> None:
        """Note the error of a traceback, unless the program has written more since."""
        if line.startswith(TRACED):
            self._traces = True
        elif not (self._traces and line[:1].isspace()):
            text = line.decode(errors="replace").strip()
            found = NO_PROGRAM.fullmatch(line)
            ends = {1: found or (self._traces and UNCAUGHT.fullmatch(line)), 2: found or USAGE.fullmatch(line)}
            self._uncaught, self._traces = {status: text for status, is_end in ends.items() if is_end}, False

    def _end_block(self) -> None:
        text = b"".join(self._block)
        self._block = []
        if exited := EXITED.search(text):  # the last line has its whole content
            self._end = f"rank {int(exited[1])} ended with status {int(exited[2])}"
            return
        if signalled := SIGNALLED.search(text):
            self._end = _describe_signal(int(signalled[1]), int(signalled[2]))
        if any(banner in text for banner in BANNERS):
            self._banners += text
            self._due = time.monotonic() + GATHERING_S
        else:
            self._out.write(text)

    def print_reports(self) -> None:
        """Print the errors that are gathered, each once, or the launcher's banners where no rank reported an error."""
        new: list[list[ErrorReport]] = []
        for report in self._gathered:
            equal = next((group for group in (*self._known, *new) if _same(group[0], report)), None)
            if equal is None:
                new.append([report])
            else:
                equal.append(report)
        self._known += new
        if not self._known:
            self._out.write(self._banners)
        self._banners = b""
        new.sort(key=lambda group: not group[0].follows)  # the cause comes last
        self._gathered = []
        for group in new:
            if group[0].text:
                several = f"{ranks_of(group)}:\n" if len(group) > 1 else ""
                self._out.write((several + group[0].text).encode())
        self._out.flush()

    def end(self, status: int = 1) -> None:
        """Print the rest of the output of a job with this status, and last the error that caused the others."""
        if self._rest:
            self._write_line(self._rest)
            self._rest = b""
        self._end_block()
        self.print_reports()
        if self._known:
            first = min(self._known, key=lambda group: group[0].follows)
            self._out.write(f"mpicomp: {last_line(first)}\n".encode())
        elif cause := ": ".join(filter(None, (self._end, self._uncaught.get(status, "")))):
            self._out.write(f"mpicomp: {cause}\n".encode())
        self._out.flush()


def _describe_signal(rank: int, number: int) -> str:
    name = signal.Signals(number).name if number in {*signal.Signals} else "unknown"
    return f"rank {rank} ended by signal {number} ({name}): {SIGNAL_CURES.get(number, CRASH_CURE)}"


def _same(one: ErrorReport, other: ErrorReport) -> bool:
    return _without_rank(one) == _without_rank(other) and one.follows == other.follows


def _without_rank(report: ErrorReport) -> str:
    return re.sub(rf"\brank {report.rank} of {report.size}\b| at 0x\w+", "?", report.text + report.last)


def ranks_of(group: Sequence[ErrorReport]) -> str:
    """Return the ranks of equal errors in words."""
    ranks, size = sorted({report.rank for report in group}), group[0].size
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {size}"
    return f"all {size} ranks" if len(ranks) == size else f"ranks {', '.join(map(str, ranks))} of {size}"


def last_line(group: Sequence[ErrorReport]) -> str:
    """Return the line of equal errors: ranks, and their error, of which the message names a rank where it is one."""
    report, ranks = group[0], ranks_of(group)
    first, *more = report.last.splitlines() or [""]
    own = f"rank {report.rank} of {report.size}"
    error = first + (" ..." if more else "")
    if len(group) == 1 and own in error:
        return error
    return f"{ranks}: {error.replace(f'{own}, ', '', 1).replace(f'{own}: ', '', 1)}"


def run_job(line: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a launcher, with its errors through `ErrorOutput`; signals reach it. Returns its exit status, as a shell."""
    job = subprocess.Popen(
        line, env={**environ, VARIABLE: "1"}, stderr=subprocess.PIPE, bufsize=0, preexec_fn=_end_with_parent
    )
    assert job.stderr is not None
    with job.stderr, _passing_signals(job):
        output, source = ErrorOutput(sys.stderr.buffer), job.stderr.fileno()
        while data := _read(source, job, output):
            output.write(data)
        status = job.wait()
        output.end(status)
    return status if status >= 0 else 128 - status


def _read(source: int, job: subprocess.Popen[bytes], output: ErrorOutput) -> bytes:
    """Return the next errors of a job; nothing after its end, though a process that it left may hold the pipe open."""
    while True:
        has_ended = job.poll() is not None  # before looking: its last output is there by then
        due_s = output.waits_s
        if select([source], [], [], LOOK_S if due_s is None else min(due_s, LOOK_S))[0]:
            return os.read(source, 1 << 16)
        if has_ended:
            return b""
        if output.waits_s == 0:
            output.print_reports()


def _end_with_parent() -> None:
    # a job must not outlive a command that is killed; where there is no such call, it may
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def _passing_signals(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the job. A terminal's Ctrl-C reaches it by itself, and another process's by this one."""

    def interrupt(number: int, frame: object) -> None:
        if not (sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()):
            job.send_signal(number)

    before = {number: signal.signal(number, lambda number, frame: job.send_signal(number)) for number in _PASSED_ON}
    before |= {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
