"""Times: a local step and a synchronization of each method, on emulated hosts at each rate.

One job times all methods in turn, in several rounds. It also times the all-reduces that a user has without this
library, Open MPI's and Gloo's, with a float32 vector of the model's length, and with one of half the length, for means
in 16 bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed

from apps.environment import environment
from apps.frontier.cases import ALGORITHMS, DENSE, GRADIENTS, Case, make_optimizer, own_optimizers
from apps.frontier.tasks import TASKS, task_loss
from apps.mpi_jobs import call_on_ranks
from apps.records import Record
from apps.studies.results import Results
from collectives import Communicator
from collectives.annotations import FloatArray
from mpicomp.cli.cluster_report.open_mpi_algorithms import SETTINGS, AllreduceAlgorithm

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
RANKS, ROUNDS = 4, 7
LOCAL = 2
"""Steps of a method of local steps that a round times: one without and one with a synchronization."""
RATE = 1e-3
GLOO_PORT = "29513"
OPEN_MPI = {"MPI_Allreduce": 0, "MPI recursive doubling": 3, "MPI ring": 4, "MPI Rabenseifner": 6}
GLOO = "Gloo"
OTHERS = (*OPEN_MPI, GLOO)
HALF = ", 16 bits"
"""End of the name of another library's all-reduce of half the bytes."""
OUR_DENSE = "our dense"
"""Name of exact means by this library, which methods with a warm-up make, in the seconds of steps."""


def measure(task: str, rounds: int) -> Record:
    """Time all methods and other all-reduces on the ranks of this job; collective."""
    torch.set_num_threads(1)
    with Communicator(topology="ring", timeout=300.0) as comm:
        updates = {name: _steps(comm, Case(task, name, LOCAL)) for name in ALGORITHMS if name != "PowerSGD"}
        gradients = {name: _steps(comm, Case(task, name, GRADIENTS)) for name in ("PowerSGD", *own_optimizers(task))}
        elements = sum(one.numel() for one in TASKS[task].build(0).parameters())
        others = _others({"": np.ones(elements, np.float32), HALF: np.ones(elements // 2, np.float32)})
        taken: dict[str, list[list[float]]] = {name: [] for name in (*updates, *gradients, *others)}
        for index in range(1 + rounds):
            for name, step in {**updates, **gradients}.items():
                found = [_timed(comm, step) for _ in range(LOCAL if name in updates else 1)]
                if index:  # the first round warms up
                    taken[name].append(found)
            for name, call in others.items():
                found = [_timed(comm, call)]
                if index:
                    taken[name].append(found)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return {"task": task, "elements": elements, "rounds": rounds, "environment": environment(), "seconds": taken}


def _steps(comm: Communicator, case: Case) -> Callable[[], None]:
    """Return a function that makes one step of the case's training."""
    task = TASKS[case.task]
    model = task.build(0)
    # as in a training of so few steps that its warm-up is over when the first round is
    optimizer: Any = make_optimizer(case, task, model, RATE, comm, 1)
    random = np.random.default_rng(comm.rank)

    def step() -> None:
        batch = task.draw(random, comm.rank, comm.size)
        optimizer.zero_grad()
        task_loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()

    return step


def _others(vectors: Mapping[str, FloatArray]) -> dict[str, Callable[[], object]]:
    """Return all-reduces of vectors by other libraries, under names with the vectors' ends; Gloo needs an address."""
    algorithm = AllreduceAlgorithm()
    comms = {name: algorithm.dup(MPI.COMM_WORLD, number) for name, number in OPEN_MPI.items()}
    if "MASTER_ADDR" in os.environ:
        os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_PORT": GLOO_PORT}
        distributed.init_process_group("gloo", rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)
    found: dict[str, Callable[[], object]] = {}
    for end, vector in vectors.items():
        out = np.empty_like(vector)
        found |= {name + end: partial(one.Allreduce, vector, out) for name, one in comms.items()}
        if distributed.is_initialized():
            found[GLOO + end] = partial(distributed.all_reduce, torch.from_numpy(vector.copy()))
    return found


def _timed(comm: Communicator, call: Callable[[], object]) -> float:
    """Return the time of a call on the slowest rank; collective."""
    comm.barrier()
    start = time.perf_counter()
    call()
    return comm.allreduce(time.perf_counter() - start, "max")


def study(results: Results, task: str, rates: Sequence[str] = tuple(RATES)) -> Record:
    """Time a task at each rate; return the records by rate."""
    found = {}
    for rate in rates:
        settings = {"task": task, "rounds": ROUNDS}  # of `measure`
        call = partial(call_on_ranks, measure, settings, RANKS, rate, SETTINGS)
        methods = [*ALGORITHMS, *own_optimizers(task)]
        found[rate] = results.get(f"times-{task}-{rate}", {**settings, "rate": rate, "methods": methods}, call)
    return found


def step_seconds(record: Record) -> Mapping[str, tuple[float, float]]:
    """Return, for each method, the median seconds of a step without and of a step with a synchronization.

    A step without one takes equally long for all methods: it is the median of all. The dense averages, of 32 and 16
    bits, are those of the fastest dense all-reduces: ours, Open MPI's or Gloo's.
    """
    medians = {name: np.median(rows, axis=0) for name, rows in record["seconds"].items()}
    local = float(np.median([one[0] for name, one in medians.items() if len(one) == LOCAL]))
    found = {name: (local, float(one[-1])) for name, one in medians.items() if name.removesuffix(HALF) not in OTHERS}
    found[OUR_DENSE] = found[DENSE]
    for method, end in ((DENSE, ""), ("float16", HALF)):
        others = [local + float(medians[name + end][0]) for name in OTHERS if name + end in medians]
        if method in found:
            found[method] = (local, min([found[method][1], *others]))
    return found
