"""The status of a program is known to its exit handlers, also after a `SystemExit` that was caught."""

from __future__ import annotations

import subprocess
import sys

import pytest

from collectives.exit_status import status_code

PROGRAM = """
import atexit, os, sys
from collectives.exit_status import exit_status, watch_exit_status
watch_exit_status()
atexit.register(lambda: print(exit_status(), flush=True))
{ending}
"""
CAUGHT = """
try:
    sys.exit(4)
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    ("ending", "known", "status"),
    [
        ("", "0", 0),
        ("sys.exit()", "0", 0),
        ("sys.exit(3)", "3", 3),
        ("sys.exit('a text')", "1", 1),
        ("quit(5)", "5", 5),
        (CAUGHT, "0", 0),
        (CAUGHT + "sys.exit(6)", "6", 6),
        ("raise SystemExit(3)", "0", 3),  # which cannot be recorded
    ],
)
def test_exit_handlers_know_the_status(ending: str, known: str, status: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ending=ending)], capture_output=True, text=True, check=False
    )
    assert (found.stdout.strip(), found.returncode) == (known, status), found.stderr


def test_statuses_are_those_that_python_passes_to_the_system() -> None:
    assert [status_code(status) for status in (None, 0, 3, "text", ())] == [0, 0, 3, 1, 1]
