"""Exit status of a command, also of one that its user or the reader of its output ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def status_of(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit status; without a traceback where Ctrl-C or a closed pipe ends it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell has closed it, as by >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:  # as of head, which has read enough; Python would write the rest at its end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"mpicomp {command}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return status
