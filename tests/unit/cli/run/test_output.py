"""Errors of a job of ``mpicomp run``: each once, the cause last, without the launcher's banners."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collectives import error_report
from collectives.error_report import MOST_BYTES, ErrorReport, parse
from mpicomp.cli.run import output
from mpicomp.cli.run.output import ErrorOutput
from tests.unit.faults.jobs import JOB_S

RULE = "-" * 74
ABORTED = f"""{RULE}
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[1,1],1]
  Errorcode: 1
{RULE}
"""
EXITED = f"""{RULE}
prterun has exited due to process rank 1 with PID 0 on node n0 calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{RULE}
"""
FAILED = f"""{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-n0-23186@1,2]
   Exit code:    {{}}
{RULE}
"""
SIGNALLED = f"{RULE}\nprterun noticed that process rank 1 with PID 7 on node n0 exited on\nsignal 11.\n{RULE}\n"
COPY = "ValueError: rank {} of 3, vector 0: the vector has 9 elements, not 10; pass 10"


def report(rank: int, last: str, follows: bool = False) -> str:
    return ErrorReport(rank, 3, f"Traceback\n{last}\n", last, follows).line()


def shown(*texts: str, status: int = 1) -> str:
    """Return the output of the command for a job that prints these texts."""
    out = io.BytesIO()
    made = ErrorOutput(out)
    for text in texts:
        made.write(text.encode())
    made.end(status)
    return out.getvalue().decode()


def test_equal_errors_are_printed_once_with_their_ranks_and_the_last_line_is_the_error() -> None:
    printed = shown(*(report(rank, COPY.format(rank)) for rank in (2, 0, 1)), ABORTED, EXITED)
    assert printed.splitlines() == [
        "all 3 ranks:",
        "Traceback",
        COPY.format(2),
        "mpicomp: all 3 ranks: ValueError: vector 0: the vector has 9 elements, not 10; pass 10",
    ]


def test_errors_that_differ_in_an_address_are_equal() -> None:
    printed = shown(*(report(rank, f"TypeError: <f at 0x7f{rank}>") for rank in range(3)))
    assert printed.splitlines()[-1] == "mpicomp: all 3 ranks: TypeError: <f at 0x7f0>"


@pytest.mark.parametrize("is_late", [False, True])
def test_banners_that_come_before_the_error_are_left_out_too(is_late: bool) -> None:
    error = report(1, "KeyError: 1")
    printed = shown(ABORTED, error, EXITED) if is_late else shown(ABORTED, EXITED, error)
    assert printed.splitlines() == ["Traceback", "KeyError: 1", "mpicomp: rank 1 of 3: KeyError: 1"]


def test_the_cause_comes_last_and_not_an_error_that_follows_from_it() -> None:
    other = "CollectiveMismatch: the ranks differ in call 1"
    printed = shown(report(0, other, True), report(1, COPY.format(1)), report(2, other, True))
    assert printed.splitlines() == [
        *("ranks 0, 2 of 3:", "Traceback", other, "Traceback", COPY.format(1)),
        f"mpicomp: {COPY.format(1)}",
    ]


def test_of_several_lines_of_a_message_the_last_line_has_the_first() -> None:
    assert shown(report(1, "KeyError: 'a\nb'")).splitlines()[-1] == "mpicomp: rank 1 of 3: KeyError: 'a ..."


def test_other_output_comes_at_once_and_unchanged() -> None:
    out = io.BytesIO()
    made = ErrorOutput(out)
    made.write(b"step 1\nste")
    assert out.getvalue() == b"step 1\nste"
    made.write(b"p 2\n\xff\x00\n")
    assert out.getvalue() == b"step 1\nstep 2\n\xff\n"
    made.write(b"\r 50 %")
    assert out.getvalue().endswith(b"\n\r 50 %")
    made.write(report(1, "KeyError: 1").encode() + f"{RULE}\nepoch 2\n".encode())
    assert out.getvalue().endswith(f"\r 50 %{RULE}\nepoch 2\n".encode())
    made.end()
    assert out.getvalue().endswith(b"mpicomp: rank 1 of 3: KeyError: 1\n")


@pytest.mark.parametrize("text", [SIGNALLED, ABORTED, f"{RULE}\nbegun\n", RULE, f"{RULE}\n" + 90 * "a\n"])
def test_blocks_that_add_something_stay(text: str) -> None:
    last = "mpicomp: rank 1 ended by signal 11 (SIGSEGV): PYTHONFAULTHANDLER=1 in the environment prints the line"
    assert shown(text) == text + f"{last} of Python that it was in\n" * (text is SIGNALLED)
    if text is not ABORTED:
        assert text in shown(report(1, "KeyError: 1"), text)


@pytest.mark.parametrize("error", ["SyntaxError: invalid syntax", "ModuleNotFoundError: No 'x'", "x.YError"])
def test_errors_before_the_first_communicator_come_last_too(error: str) -> None:
    for first in ("Traceback (most recent call last):\n  import x", '  File "x.py", line 1\n    x x'):
        printed = shown(f"{first}\n{error}\n", FAILED.format(1))
        assert printed.splitlines()[2:] == [error, f"mpicomp: rank 2 ended with status 1: {error}"]


@pytest.mark.parametrize(
    "logged",
    ["ValueError: 1\n", "train: error: retrying\n", "Traceback (most recent call last):\n  x\nValueError: 1\nretry\n"],
)
def test_errors_that_a_program_has_logged_are_not_named_as_the_cause(logged: str) -> None:
    assert shown(logged, FAILED.format(1)) == f"{logged}mpicomp: rank 2 ended with status 1\n"
    assert shown(logged, status=0) == logged


def test_the_last_line_of_wrong_arguments_is_the_programs_own() -> None:
    error = "python -m train: error: argument --lr: invalid float value: 'x'"
    assert shown(f"usage: train\n{error}\n", FAILED.format(2), status=2).splitlines()[1:] == [
        error,
        f"mpicomp: rank 2 ended with status 2: {error}",
    ]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, "/home/me/an env/bin/python3.11: No module named train.models"),
        (1, "python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')"),
        (2, "/usr/bin/python: can't open file '/home/me/train.py': [Errno 2] No such file or directory"),
    ],
)
def test_a_program_that_python_cannot_begin_is_named_last(status: int, error: str) -> None:
    printed = shown(f"{error}\n", f"{error}\n", FAILED.format(status), status=status)
    assert printed.splitlines()[2:] == [f"mpicomp: rank 2 ended with status {status}: {error}"]


@pytest.mark.parametrize(
    "line",
    [
        "[warn] Epoll MOD(1) on fd 21 failed. Old events were 6; read change was 0 (none): Bad file descriptor\n",
        "[n0:7] PMIX ERROR: PMIX_ERR_UNREACH in file pmix_server.c at line 3146\n",
    ],
)
def test_lines_of_the_launchers_libraries_are_left_out(line: str) -> None:
    traced = "Traceback (most recent call last):\n  x\nKeyError: 1\n"
    last = "mpicomp: rank 2 ended with status 1: KeyError: 1\n"
    assert shown(traced, line, FAILED.format(1)) == traced + last


def test_errors_come_soon_where_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "GATHERING_S", 0.01)
    out = io.BytesIO()
    made = ErrorOutput(out)
    assert made.waits_s is None
    made.write(report(1, "KeyError: 1").encode())
    assert made.waits_s is not None
    assert made.waits_s <= 0.01
    made.print_reports()
    assert out.getvalue() == b"Traceback\nKeyError: 1\n"
    assert made.waits_s is None
    made.write(report(2, "KeyError: 1").encode())
    made.end()
    assert out.getvalue().decode().splitlines()[2:] == ["mpicomp: ranks 1, 2 of 3: KeyError: 1"]


def test_a_long_traceback_is_printed_and_reported_by_its_error_alone() -> None:
    line = ErrorReport(1, 3, "long\n" * MOST_BYTES, "KeyError: 1", False).line()
    *lines, last = line.splitlines()
    assert {*lines} == {"long"}
    assert parse(last) == (1, 3, "", "KeyError: 1", False)
    assert len(ErrorReport(1, 3, "", "e" * 9 * MOST_BYTES, False).line()) <= MOST_BYTES
    assert parse(error_report.START.decode() + "[1, 2") is None


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import mpicomp
if sys.argv[1] == "early":
    raise OSError("no data")
comm = mpicomp.Communicator()
comm.barrier()
if sys.argv[1] == "raise":
    raise KeyError("the disk is on fire")
if sys.argv[1] == "exit":
    sys.exit(3 * comm.rank)
if sys.argv[1] == "text":
    sys.exit("no data" if comm.rank else comm.barrier())
Path(sys.argv[2], f"rank-{comm.rank}").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, "-m", "mpicomp.cli.main", "run", "-n", "2", str(tmp_path / "program.py")]


@pytest.mark.timeout(2 * JOB_S)
@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        # the first rank may end the other before its error is printed
        ("raise", 1, r"mpicomp: (all 2 ranks|rank [01] of 2): KeyError: 'the disk is on fire'"),
        ("early", 1, r"mpicomp: (all 2 ranks|rank [01] of 2): OSError: no data"),
        ("exit", 3, "mpicomp: rank 1 of 2: the program ends with status 3, ending the job"),
        ("text", 1, "mpicomp: rank 1 of 2: no data"),  # and not that rank 0 has waited for it
    ],
)
def test_a_job_that_fails_ends_with_its_cause(command: list[str], end: str, status: int, last: str) -> None:
    done = subprocess.run(
        [*command, end], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=JOB_S, check=False
    )
    assert done.returncode == status, done.stderr
    assert re.fullmatch(last, done.stderr.splitlines()[-1]), done.stderr
    assert done.stderr.count("Traceback") == (end in ("raise", "early")) or end == "text"  # rank 0 may have waited
    assert "MPI_ABORT" not in done.stderr


def test_a_process_that_outlives_the_job_does_not_hold_the_command() -> None:
    start = time.monotonic()
    assert output.run_job(["sh", "-c", "sleep 30 & exit 4"], os.environ) == 4
    assert time.monotonic() - start < 20


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.timeout(2 * JOB_S)
def test_a_command_that_is_killed_ends_its_job(command: list[str], tmp_path: Path) -> None:
    job = subprocess.Popen([*command, "wait", str(tmp_path)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    while not all(file.exists() and file.read_text() for file in files):
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.wait()
    pids = [int(file.read_text()) for file in files]
    while any(map(is_alive, pids)):  # the test's limit ends it
        time.sleep(0.05)
