"""A step of a small model with PyTorch: without exchange, with exact means, and with Relay."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import mpicomp
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.cli.cluster_report.progress import Progress
from mpicomp.cli.cluster_report.rounds import Budget, timed_rounds, with_median

STEPS = {"alone": None, "dense": mpicomp.Dense(), "relay": mpicomp.Relay(levels=4)}
WIDTHS = (1024, 2048, 2048, 2048)
PARAMETERS = sum(n * m + m for n, m in pairwise(WIDTHS))
BATCH = 32
CALLS_EXPECTED = 12  # that take as long as a dense exchange: warm-up and 3 rounds of the three steps, with a margin


def measure(comm: Communicator, dense_s: float, budget: Budget, progress: Progress) -> dict[str, Any]:
    """Time steps in turn, or state why not; collective. `dense_s` is expected of a dense all-reduce of the model."""
    progress.begin(f"training steps of a model of {PARAMETERS / 1e6:.1f} million parameters")
    entry: dict[str, Any] = {"skipped": None, "parameters": PARAMETERS, "steps": []}
    if not all(comm.allgather_object(find_spec("torch") is not None)):
        return entry | {"skipped": "no torch"}
    if CALLS_EXPECTED * dense_s > budget.left_s():
        return entry | {"skipped": "time"}
    calls = {name: _step(algorithm, comm) for name, algorithm in STEPS.items()}
    for call in calls.values():
        call()
    timed = timed_rounds(calls, comm, budget.left_s() / 2, budget, progress)
    return entry | {"steps": [{"name": name, **with_median(times)} for name, times in timed.items()]}


def _step(algorithm: Algorithm | None, comm: Communicator) -> Callable[[], object]:
    """Return a training step; Relay averages updates, the others gradients if any."""
    import torch
    from torch import nn

    from mpicomp.torch import DistributedOptimizer, broadcast_parameters

    model = nn.Sequential(*(layer for n, m in pairwise(WIDTHS) for layer in (nn.Linear(n, m), nn.ReLU())))
    broadcast_parameters(model, comm)
    inputs = torch.randn(BATCH, WIDTHS[0], device="cpu", dtype=torch.float32)
    labels = torch.randint(WIDTHS[-1], (BATCH,), device="cpu", dtype=torch.int64)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if algorithm is not None:
        is_relay = isinstance(algorithm, mpicomp.Relay)
        optimizer = DistributedOptimizer(optimizer, algorithm, comm, synchronize="updates" if is_relay else "gradients")

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
