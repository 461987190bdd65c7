"""Times: a local step and a synchronization of each method, on emulated hosts at each rate.

One job times all methods in turn, in several rounds. It also times steps of the loop that a user writes without this
library: gradients are views of one vector, whose mean is Open MPI's or Gloo's. For means in 16 bits the vector is
converted, and the message has half its length.
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
from torch import Tensor, distributed

from apps.environment import environment
from apps.frontier.cases import ALGORITHMS, DENSE, GRADIENTS, Case, make_optimizer, own_optimizers
from apps.frontier.tasks import TASKS, Task, task_loss
from apps.mpi_jobs import call_on_ranks
from apps.records import Record
from apps.studies.results import Results
from collectives import Communicator
from mpicomp.cli.cluster_report.open_mpi_algorithms import SETTINGS, AllreduceAlgorithm

RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
RANKS, ROUNDS = 4, 3
REPEATED = 3
"""Timed repetitions of a method in each round, behind one that finds the caches of the method before."""
LOCAL = 2
"""Steps of a method of local steps that a round times: one without and one with a synchronization."""
RATE = 1e-3
GLOO_PORT = "29513"
OPEN_MPI = {"MPI_Allreduce": 0, "MPI recursive doubling": 3, "MPI ring": 4, "MPI Rabenseifner": 6}
GLOO = "Gloo"
OTHERS = (*OPEN_MPI, GLOO)
HALF = ", 16 bits"
"""End of the name of another library's loop whose message has half the bytes."""
OUR_DENSE = "our dense"
"""Name of exact means by this library, which methods with a warm-up make, in the seconds of steps."""


def measure(task: str, rounds: int) -> Record:
    """Time all methods and the loops of other libraries on the ranks of this job; collective."""
    torch.set_num_threads(1)
    with Communicator(topology="ring", timeout=300.0) as comm:
        updates = {name: _steps(comm, Case(task, name, LOCAL)) for name in ALGORITHMS if name != "PowerSGD"}
        gradients = {name: _steps(comm, Case(task, name, GRADIENTS)) for name in ("PowerSGD", *own_optimizers(task))}
        elements = sum(one.numel() for one in TASKS[task].build(0).parameters())
        others = _others(task, elements)
        taken: dict[str, list[list[float]]] = {name: [] for name in (*updates, *gradients, *others)}
        for index in range(1 + rounds):
            for name, step in {**updates, **gradients, **others}.items():
                for repeat in range(1 + REPEATED if index else 1):  # the first round warms up
                    found = [_timed(comm, step) for _ in range(LOCAL if name in updates else 1)]
                    if repeat:
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


def _others(task: str, elements: int) -> dict[str, Callable[[], None]]:
    """Return steps with means by other libraries, in 32 bits and in 16; Gloo needs an address."""
    algorithm = AllreduceAlgorithm()
    comms = {name: algorithm.dup(MPI.COMM_WORLD, number) for name, number in OPEN_MPI.items()}
    if "MASTER_ADDR" in os.environ:
        os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_PORT": GLOO_PORT}
        distributed.init_process_group("gloo", rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)
    found: dict[str, Callable[[], None]] = {}
    for end, length in (("", elements), (HALF, elements // 2)):
        for name, one in comms.items():
            vector, out = torch.zeros(length), torch.zeros(length)
            reduce = partial(one.Allreduce, vector.numpy(), out.numpy())
            found[name + end] = _loop(TASKS[task], vector, out, reduce, elements)
        if distributed.is_initialized():  # in place
            vector = torch.zeros(length)
            found[GLOO + end] = _loop(TASKS[task], vector, vector, partial(distributed.all_reduce, vector), elements)
    return found


def _loop(task: Task, vector: Tensor, out: Tensor, reduce: Callable[[], object], elements: int) -> Callable[[], None]:
    """Return a function that makes a step with the mean of `vector`, which `reduce` adds up into `out`."""
    model = task.build(0)
    inner = task.optimizer(model.parameters(), RATE)
    random, size = np.random.default_rng(MPI.COMM_WORLD.rank), MPI.COMM_WORLD.size
    in_16_bits = vector.numel() < elements
    gradients = torch.zeros(elements) if in_16_bits else vector
    halves = torch.zeros(elements, dtype=torch.float16)
    parameters = list(model.parameters())
    for one, view in zip(parameters, gradients.split([one.numel() for one in parameters]), strict=True):
        one.grad = view.view_as(one)

    def step() -> None:
        batch = task.draw(random, MPI.COMM_WORLD.rank, size)
        gradients.zero_()
        task_loss(model(batch.inputs), batch.targets).backward()
        if in_16_bits:
            # MPI adds no float16: zeros of as many bytes stand in for these, in time alone
            halves.copy_(gradients)
            reduce()
            gradients.copy_(halves)
        else:
            reduce()
            torch.div(out, size, out=gradients)
        inner.step()

    return step


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
    bits, are those of the fastest loops: with this library, or with the means of Open MPI or Gloo.
    """
    medians = {name: np.median(rows, axis=0) for name, rows in record["seconds"].items()}
    local = float(np.median([one[0] for name, one in medians.items() if len(one) == LOCAL]))
    found = {name: (local, float(one[-1])) for name, one in medians.items() if name.removesuffix(HALF) not in OTHERS}
    found[OUR_DENSE] = found[DENSE]
    for method, end in ((DENSE, ""), ("float16", HALF)):
        others = [float(medians[name + end][0]) for name in OTHERS if name + end in medians]
        if method in found:
            found[method] = (local, min([found[method][1], *others]))
    return found
