"""One training of the demo, on all ranks: each has its own batches, and all have one model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.cli.demo.model import N_PARAMETERS, Adam, gradient, initial_parameters, n_correct
from mpicomp.cli.demo.text import N_TESTED, Text

BATCH = 64  # characters of each rank and step


@dataclass(frozen=True)
class Point:
    """Test of the model after some steps."""

    step: int
    accuracy: float  # part of the tested characters that the model predicts
    seconds: float  # of all training steps so far, without tests, on the slowest rank
    seconds_waiting: float  # within all-reduces, when a rank had nothing else to do; mean over ranks
    bytes_sent: float  # mean over ranks


Report = Callable[[int, Point | None], None]
"""Called before each step, and at the end, with the number of steps so far and the point if the model was tested."""


def compile_kernels(comm: Communicator, methods: tuple[Algorithm, ...]) -> None:
    """Compile the kernels of all methods, unless this machine has them; collective."""
    for method in methods:
        method.start(comm, N_PARAMETERS)


def train(
    comm: Communicator,
    method: Algorithm,
    text: Text,
    *,
    steps: int,
    test_every: int,
    seed: int,
    until: float = math.inf,
    report: Report | None = None,
) -> list[Point]:
    """Train a model and return its points, equal on all ranks; collective."""
    model, averaged, own = (
        initial_parameters(seed),
        np.empty(N_PARAMETERS, np.float32),
        np.empty(N_PARAMETERS, np.float32),
    )
    aggregator, adam = method.start(comm, N_PARAMETERS), Adam()
    random, tests = np.random.default_rng((seed, comm.rank)), text.tests(comm.rank, comm.size)
    seconds, points = 0.0, []
    # at most so many steps: the training ends at the first test with the accuracy `until`
    for step in range(steps + 1):
        point = None
        if step % test_every == 0 or step == steps:
            total = aggregator.traffic.total
            point = Point(
                step,
                comm.allreduce(n_correct(model, *tests)) / N_TESTED,
                comm.allreduce(seconds, "max"),
                comm.allreduce(total.seconds_waiting, "mean"),
                comm.allreduce(float(total.bytes_sent), "mean"),
            )
            points.append(point)
        if report is not None:
            report(step, point)
        if step == steps or (point is not None and point.accuracy >= until):
            break
        if point is not None:
            comm.barrier()  # no rank waits for another's test within a step
        start = time.perf_counter()
        gradient(model, *text.batch(random, BATCH), out=own)
        # As `DistributedOptimizer` does: a method averages gradients, or the updates of each rank's own Adam.
        if method.synchronize == "updates":
            model -= aggregator.aggregate(adam.update(own), averaged)
        else:
            model -= adam.update(aggregator.aggregate(own, averaged))
        seconds += time.perf_counter() - start
    return points
