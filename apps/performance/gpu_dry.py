"""Run a program for GPUs on the CPU, with a clock of the host in place of events: its figures mean nothing.

``python -m apps.performance.gpu_dry gpu_training --quick`` makes every call that the program makes on a GPU, but for
those of the device itself. So a program that was changed without a GPU does not fail where there is one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from apps.performance import gpu_allreduce, gpu_kernels, gpu_training
from apps.performance.gpu_calls import calls
from apps.performance.gpu_machine import Place
from apps.performance.gpu_profile import Activity
from collectives import Communicator

PROGRAMS = ("gpu_kernels", "gpu_training", "gpu_allreduce")
SOFTWARE = {"device": "the CPU, in a dry run", "driver": "none", "torch": "any", "triton": "any"}


class HostEvent:
    """Stand-in for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        """Note the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Return milliseconds from this event to another one."""
        return 1e3 * (end._at - self._at)


def on_host(timed: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Call everything once; the seconds are those of the host."""
    found = {}
    for name, call in timed.items():
        start = time.perf_counter()
        call()
        found[name] = np.full(repeats, time.perf_counter() - start)
    return found


def run_profile(call: Callable[[], object], trace: Path | None = None) -> list[Activity]:
    """Make the calls of a profile, of which the CPU has no activities."""
    call()
    return []


def place(comm: Communicator, what: str) -> Place:
    """Return the CPU as the place of a rank."""
    return Place("cpu", alone=False)


def main(argv: Sequence[str]) -> int:
    """Run a program with its options; returns its exit status."""
    if argv[:1] == [] or argv[0] not in PROGRAMS:
        print(f"error: name one of {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    cuda = "torch.cuda."
    with (
        patch(f"{cuda}synchronize", lambda: None),
        patch(f"{cuda}Event", HostEvent),
        patch(f"{cuda}get_device_name", lambda *_: SOFTWARE["device"]),
        patch.object(gpu_kernels, "name_missing", lambda numba_cuda: ""),
        patch.object(gpu_kernels, "time_on_device", on_host),
        patch.object(gpu_kernels, "calls", lambda n, device: calls(n, "cpu")),
        patch.multiple(gpu_training, choose_gpu=place, software=lambda: SOFTWARE, record=run_profile),
        # its memory is the device's own
        patch.multiple(gpu_allreduce, choose_gpu=place, software=lambda: SOFTWARE, record=run_profile),
        patch.object(gpu_allreduce, "_memory", lambda *_: {"beyond": 0.0, "piece": 1.0}),
    ):
        status: int = import_module(f"apps.performance.{argv[0]}").main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
