"""Signals whose handlers raise exceptions, in the middle of a call."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_by(error: BaseException) -> Iterator[Callable[..., None]]:
    """Yield a function that a signal interrupts, whose handler raises this error."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    previous = signal.signal(signal.SIGUSR2, handle)
    try:
        yield lambda *_: signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, previous)
