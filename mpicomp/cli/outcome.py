"""Exit status of a command, also where Ctrl-C or a closed pipe ends it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def open_closed_outputs() -> None:
    """Open /dev/null for outputs that the shell has closed, as by >&-, before other files take their descriptors."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w"))


def run_command(command: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit status; without a traceback where Ctrl-C or a closed pipe ends it."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as of head, which has read enough; Python would write the rest at its end
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{f'mpicomp {command}'.strip()}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
