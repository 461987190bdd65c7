"""Figures of timed calls that only the measuring programs need."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from collectives import Communicator
from mpicomp.cli.timing import Seconds, elapsed, spin_barrier


def elapsed_and_processor(call: Callable[[], object], comm: Communicator) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a call on this rank, behind a barrier; collective."""
    spin_barrier(comm)
    processor = time.process_time()
    seconds = elapsed(call)
    return seconds, time.process_time() - processor


def summary(seconds: Seconds) -> dict[str, float]:
    """Return median and minimum."""
    return {"median_s": float(np.median(seconds)), "min_s": float(seconds.min())}
