"""Targets, and the verdict on one input."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

LONGEST_S = 5.0  # processor time of one input
HUNG_S = 60.0  # on the clock, after which an input is given up
MOST_BYTES, MOST_PER_BYTE = 1 << 26, 1000  # growth of the process's largest size by one input


@dataclass(frozen=True)
class Target:
    """A reader, with inputs that it accepts."""

    name: str
    reads: str  # names of the functions that get the bytes
    seeds: Callable[[], Sequence[bytes]]  # accepted inputs, from which mutations start
    run: Callable[[bytes], object]  # reads one input; its result is ignored
    # documented; errors of derived types, such as UnicodeDecodeError, are faults
    errors: tuple[type[Exception], ...] = (ValueError,)

    def fault(self, content: bytes) -> str:
        """Read an input; return the fault in words, or an empty text. Crashes and hangs end the process instead."""
        before = _peak_bytes()
        try:
            self.run(content)
        except Exception as error:  # noqa: BLE001 - the verdict is about all of them
            if type(error) not in self.errors:
                return f"{type(error).__name__}: {error}"
            if not str(error).strip():
                return f"a {type(error).__name__} without a message"
        grown = _peak_bytes() - before
        if grown > MOST_BYTES + MOST_PER_BYTE * len(content):
            return f"the process has grown by {grown >> 20} MiB"
        return ""


class Hang(BaseException):
    """An input has taken too long. Not an Exception, so that no reader takes it for damage of the input."""


def limit_time(seconds: float) -> None:
    """Raise `Hang` in the main thread after some seconds, counted again by each call; 0 ends the count."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def raise_hang(number: int, frame: FrameType | None) -> Any:
    """Handle SIGALRM."""
    raise Hang(f"an input took longer than {HUNG_S:g} s")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
