"""Many training steps with overlap in which each rank leaves out other parameters: memory and calls that stay behind.

``mpirun -n 2 python -m apps.performance.soak``. A deadlock ends by the communicator's timeout.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import mpicomp
from apps.performance.part import Column, Part, Row, get, make_record
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm

WIDTH, LAYERS, TAKEN = 64, 12, 0.6
LOOKS = 10
Mode = Literal["gradients", "updates"]
METHODS: dict[str, tuple[Algorithm, Mode]] = {
    "dense, gradients": (mpicomp.Dense(), "gradients"),
    "Marsit, updates": (mpicomp.Marsit(), "updates"),
    "DoubleSqueeze, gradients": (mpicomp.DoubleSqueeze(), "gradients"),
    "Auto, updates": (mpicomp.Auto(), "updates"),
}


def measure(steps: int) -> Record | None:
    """Make so many steps with each method; collective."""
    with Communicator() as comm:
        rows: list[Row] = []
        for name, (algorithm, mode) in METHODS.items():
            step = _stepper(comm, algorithm, mode)
            looks, start = [], time.perf_counter()
            for number in range(1, steps + 1):
                step()
                if number % max(1, steps // LOOKS) == 0:
                    looks.append(_resident_mb())
            seconds = time.perf_counter() - start
            early, late = (max(comm.mpi_comm.allgather(one)) for one in (looks[1], looks[-1]))
            in_flight = sum(comm.mpi_comm.allgather(len(comm.calls.ordered)))
            rows.append(
                {"name": name, "steps": steps, "early_mb": early, "late_mb": late, "in_flight": in_flight}
                | {"step_ms": 1e3 * seconds / steps}
            )
        return None if comm.rank else make_record(rows, ranks=comm.size, layers=LAYERS, width=WIDTH, taken=TAKEN)


def _stepper(comm: Communicator, algorithm: Algorithm, mode: Mode) -> Callable[[], None]:
    """One training step, with layers that each rank draws for itself."""
    import torch

    from mpicomp.torch import DistributedOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    inner = torch.optim.SGD(layers.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(
        inner, algorithm, comm, layers.named_parameters(), mode, overlap=True, bucket_mb=0.05
    )  # several buckets of a small model
    draw, inputs = random.Random(comm.rank), torch.ones(4, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        x = inputs
        for layer in layers:
            x = layer(x).relu() if draw.random() < TAKEN else x
        if x.requires_grad:
            torch.autograd.backward(x.square().mean())
        optimizer.step()

    return step


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


COLUMNS: Sequence[Column] = (
    ("method, mode", get("name")),
    ("steps", lambda row: f"{row['steps']:,}"),
    ("a step, ms", get("step_ms", ".2f")),
    ("resident after a fifth, MiB", get("early_mb", ".1f")),
    ("resident at the end, MiB", get("late_mb", ".1f")),
    ("calls in flight at the end", get("in_flight")),
)
PART = Part(
    "soak",
    "Training steps in which each rank leaves out other parameters: memory and calls that stay behind.",
    measure,
    COLUMNS,
    quick={"steps": 50},
    full={"steps": 10_000},
    ranks=(2,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
