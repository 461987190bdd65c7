"""Cost of `diagnostics`: steps of a training, with and without the call after each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import MS, Column, Part, Row, both, make_record
from apps.performance.wrapper import inputs_of, perceptron, train_step
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.cli.timing import alternate

MOST_OVER = 1.005
SIDES = ("plain", "watched", "watched", "plain")
"""Two models each, since a model's place in memory alone makes a step some percent faster or slower."""
METHODS: dict[str, Algorithm] = {"Relay": mpicomp.Relay(), "DoubleSqueeze": mpicomp.DoubleSqueeze()}
AUDIT_EVERY = 100


def measure(n: int, batch: int, repeats: int) -> Record | None:
    """Time steps of an MLP of about `n` parameters, measured every 10 steps and audited every 100; collective."""
    import torch

    torch.set_num_threads(1)
    with Communicator() as comm:
        rows: list[Row] = []
        for name, algorithm in METHODS.items():
            models = {f"{side} {place}": side for place, side in enumerate(SIDES)}
            timed = alternate(
                {key: _steps(comm, algorithm, n, batch, side) for key, side in models.items()}, repeats, 1, comm
            )
            seconds = {side: np.concatenate([timed[key] for key in models if models[key] == side]) for side in SIDES}
            rows.append({"method": name, **{side: summary(found) for side, found in seconds.items()}})
        record = make_record(rows, n=n, batch=batch, ranks=comm.size, repeats=repeats)
        return None if comm.rank else record


def _steps(comm: Communicator, algorithm: Algorithm, n: int, batch: int, side: str) -> Callable[[], None]:
    """Return a function that makes `AUDIT_EVERY` steps."""
    from mpicomp.torch import DistributedOptimizer

    model, inner = perceptron("SGD", n)
    optimizer = DistributedOptimizer(inner, algorithm, comm, model.named_parameters())
    inputs = inputs_of(model, batch)

    def steps() -> None:
        for _ in range(AUDIT_EVERY):
            train_step(model, optimizer, inputs)
            if side == "watched":
                optimizer.diagnostics(audit_every=AUDIT_EVERY)

    return steps


COLUMNS: Sequence[Column] = (
    ("method", lambda row: row["method"]),
    (f"{AUDIT_EVERY} steps, ms", lambda row: both(row["plain"], MS)),
    ("watched, ms", lambda row: both(row["watched"], MS)),
    ("over plain", lambda row: f"{row['watched']['median_s'] / row['plain']['median_s']:.4f}"),
    ("target", lambda row: f"≤ {MOST_OVER}"),
)
PART = Part(
    "watching",
    "Training steps on two ranks, with and without `diagnostics` after each.",
    measure,
    COLUMNS,
    quick={"n": 20_000, "batch": 8, "repeats": 2},
    full={"n": 1_000_000, "batch": 64, "repeats": 15},
    ranks=(2,),
)


if __name__ == "__main__":
    sys.exit(PART.main())
