"""A step of a small model with PyTorch: without exchange, with exact means, and with Relay."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import mpicomp
from collectives import CollectiveError, Communicator
from collectives.quoting import one_line
from mpicomp.algorithms import Algorithm
from mpicomp.cli.cluster_report.progress import Progress
from mpicomp.cli.cluster_report.rounds import Budget, timed_rounds, with_median

STEPS = {"alone": None, "dense": mpicomp.Dense(), "relay": mpicomp.Relay(levels=4)}
WIDTHS = (1024, 2048, 2048, 2048)
PARAMETERS = sum(n * m + m for n, m in pairwise(WIDTHS))
BATCH = 32
MOST_CHARACTERS = 200  # of an error's line
CALLS_EXPECTED = 12  # that take as long as a dense exchange: warm-up and 3 rounds of the three steps, with a margin


def measure(
    comm: Communicator, connect: Callable[[], Communicator], dense_s: float, budget: Budget, progress: Progress
) -> dict[str, Any]:
    """Time steps in turn, or state why not; collective.

    `connect` makes the communicator of the steps, which an error in one of them ends. `dense_s` is expected of a dense
    all-reduce of the model.
    """
    progress.begin(f"training steps of a model of {PARAMETERS / 1e6:.1f} million parameters")
    entry: dict[str, Any] = {"skipped": None, "parameters": PARAMETERS, "steps": []}
    hosts, have_torch = zip(*comm.allgather_object((platform.node(), find_spec("torch") is not None)), strict=True)
    if not all(have_torch):
        return entry | {"skipped": "no torch"}
    if CALLS_EXPECTED * dense_s > budget.left_s():
        return entry | {"skipped": "time"}
    with suppress(_StepFailed), connect() as own:
        errors: list[Exception] = []
        calls = {name: _guarded(algorithm, own, errors) for name, algorithm in STEPS.items()}
        for call in calls.values():
            call()
        timed = timed_rounds(calls, comm, budget.left_s() / 2, budget, progress)
        lines = comm.allgather_object([(isinstance(one, CollectiveError), _line(one, hosts)) for one in errors[:1]])
        if not any(lines):
            return entry | {"steps": [{"name": name, **with_median(times)} for name, times in timed.items()]}
        raise _StepFailed  # so that the communicator is left instead of closed
    _, line = min(one for of_rank in lines for one in of_rank)  # a rank's own error before its echo on the others
    return entry | {"skipped": f"error: {line}"}


class _StepFailed(Exception):
    """A training step has failed on a rank."""


def _guarded(algorithm: Algorithm | None, comm: Communicator, errors: list[Exception]) -> Callable[[], None]:
    """Return a step that adds its error to a list instead of raising it, and does nothing after one."""
    step: Callable[[], object] | None = None

    def call() -> None:
        nonlocal step
        if errors and (algorithm is None or isinstance(errors[-1], CollectiveError)):
            return
        try:
            if errors:  # of a step without exchange, which the others have made
                raise errors[-1]
            step = step or _step(algorithm, comm)
            step()
        except Exception as error:  # noqa: BLE001 - goes into the report
            errors.append(error)
            if algorithm is not None and not isinstance(error, CollectiveError):
                with suppress(Exception):  # the others then raise CollectiveMismatch
                    comm.reject(error, "a training step")
                errors.append(CollectiveError("the ranks have stopped"))

    return call


def _line(error: Exception, hosts: Iterable[str]) -> str:
    """Return an error on one line, without words that may be paths, addresses or names of hosts."""
    text = one_line(f"{type(error).__name__}: {error}")
    for host in sorted(filter(None, hosts), key=len, reverse=True):  # n12 before n1
        text = text.replace(host, "...")
    text = re.sub(r"\S*([/\\~@]|[A-Za-z0-9-]\.[A-Za-z]{2})\S*", "...", text)
    return re.sub(r"[^ -~]", "?", text)[:MOST_CHARACTERS]


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
