"""Times of pipeline steps on slow links: measured on emulated hosts, and modelled from processor time and bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from apps.mpi_jobs import call_on_ranks
from apps.pipeline.job import corpus_of
from apps.pipeline.options import Options
from apps.pipeline.training import Training
from apps.records import Record
from apps.reproduce.marsit.step_time import others_use
from apps.studies.results import Results
from collectives import Communicator
from mpicomp.pipeline.schedule import schedule
from mpicomp.pipeline.simulate import Times, all_stages, simulate_time

EPOCHS = 4
FIRST, LATER = "first", "later"
"""The epoch in which AQ-SGD sends activations in full precision, and those that follow."""
BACKWARD_PART = 2 / 3
"""Of the processor time of a micro-batch."""


def measured(results: Results, name: str, runs: Mapping[str, Record], ranks: int, rate: str) -> Record:
    """Time steps of runs with these options by turns on emulated hosts; ClusterError if there can be none here.

    Returns
    -------
    dict
        ``costs`` by name and by `FIRST` and `LATER`: ``elapsed_s`` and ``processor_s`` of a step, and ``forward_bytes``
        and ``backward_bytes`` of a cut and step. ``payload_bits_per_s`` of a link.
        ``others_use``: the processors that other programs used.
    """
    arguments = {"runs": dict(runs), "epochs": EPOCHS}

    def make() -> Record:
        busy = others_use()
        return {**call_on_ranks(time_steps, arguments, ranks, rate), "others_use": busy}

    return results.get(f"{name}-{rate}", {**arguments, "rate": rate, "ranks": ranks}, make)


def time_steps(runs: Mapping[str, dict[str, Any]], epochs: int) -> Record:
    """Train epochs with each of these options by turns; returns the cost of steps. For all ranks of a job."""
    with Communicator() as comm:
        trainings = {name: _training(Options(**options), comm) for name, options in runs.items()}
        found: dict[str, list[Record]] = {name: [] for name in runs}
        for _ in range(epochs):
            for name, training in trainings.items():
                found[name].append(_epoch(training, comm))
        for training in trainings.values():
            training.close()
        return {"costs": {name: {FIRST: of_one[0], LATER: _median(of_one[1:])} for name, of_one in found.items()}}


def modelled_s(costs: Mapping[str, float], options: Options, bits_per_s: float) -> float:
    """Seconds of a step on stages that have a processor each, whose links carry so many bits a second."""
    micro_batches = options.micro_batches
    computing = costs["processor_s"] / micro_batches
    forward, backward = (8 * costs[f"{way}_bytes"] / micro_batches / bits_per_s for way in ("forward", "backward"))
    times = Times(
        forward=(1 - BACKWARD_PART) * computing, backward=BACKWARD_PART * computing,
        forward_wire=forward, backward_wire=backward,
    )  # fmt: skip
    return simulate_time(all_stages(schedule(options.schedule), options.stages, micro_batches), times).seconds


def epoch_ends(first_s: float, later_s: float, epochs: int, steps: int) -> list[float]:
    """Seconds of training at the end of each epoch of so many steps."""
    return [steps * (first_s + later * later_s) for later in range(epochs)]


def reached_s(goal: float, losses: Sequence[float], ends: Sequence[float]) -> float | None:
    """Seconds until the loss is reached, on straight lines between the ends of epochs; None if it never is."""
    for epoch, loss in enumerate(losses):
        if loss <= goal:
            if not epoch:
                return ends[0]
            before = losses[epoch - 1]
            return ends[epoch - 1] + (before - goal) / (before - loss) * (ends[epoch] - ends[epoch - 1])
    return None


def _training(options: Options, comm: Communicator) -> Training:
    import torch

    torch.set_num_threads(1)
    return Training(options, comm, corpus_of(options))


def _epoch(training: Training, comm: Communicator) -> Record:
    """Medians of an epoch's steps but the first: time on the wall, processor time as a mean over stages, and bytes."""
    stamps: list[tuple[float, float]] = []
    found = training.train_epoch(lambda: stamps.append((time.perf_counter(), time.thread_time())))
    own = np.median([np.subtract(after, before) for before, after in pairwise(stamps)], axis=0)
    both = np.array(comm.allgather_object(own.tolist()))
    cuts_and_steps = (training.options.stages - 1) * training.steps_per_epoch
    return {
        "elapsed_s": float(both[:, 0].max()),
        "processor_s": float(both[:, 1].mean()),
        "forward_bytes": found["bytes_forward"] / cuts_and_steps,
        "backward_bytes": found["bytes_backward"] / cuts_and_steps,
    }


def _median(epochs: Sequence[Record]) -> Record:
    return {key: float(np.median([one[key] for one in epochs])) for key in epochs[0]}
