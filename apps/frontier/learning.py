"""Learning: the score of each method by steps and bytes, each at the best of three learning rates.

Rates are chosen on a seed of their own, with as many steps and as many rates for every method: for gradients, for
updates of every step, and for those of 10 local steps and more; so are pairs of outer optimizers, at the rate without
one. Runs of the record are not made again: missing ones are added, in the order of the cases, until `minutes` have
passed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from apps.frontier.cases import OUTER_PAIRS, Case, cases_of, make_optimizer
from apps.frontier.tasks import TASKS, Task, task_loss
from apps.launch import PROJECT
from apps.records import Record, read_record, write_record
from apps.studies.parallel import Run, run_parallel
from apps.studies.results import Results, slug
from apps.train.learning_rate import LearningRate
from collectives import Communicator
from collectives.errors import NonFiniteGradient
from collectives.threads.run_local import run_local
from mpicomp.torch import ZeroOneAdam

RECORD = PROJECT / "docs" / "records" / "frontier" / "learning.json"
TUNING_SEED = 1000  # of the runs that choose a learning rate, and of no others
TIMEOUT_S = 1200.0
BLOCK = 8
"""Cases of a task that are tuned and trained before the next ones."""
Rates = Mapping[tuple[str, int], float]
"""The best rate of a method, by `Case.tuned_at`."""
Pair = tuple[float, float]
Tried = TypeVar("Tried")


def train(comm: Communicator, case: Case, lr: float, seed: int, steps: int) -> Record:
    """Train one rank's replica; collective.

    Returns
    -------
    dict
        ``scores``: of the common model after every `Task.evaluated` steps. ``bytes``: sent by all synchronizations,
        mean over ranks. ``elements``: of the model.
    """
    task = TASKS[case.task]
    torch.set_num_threads(1)  # of this thread: the ranks are the parallel part
    model = task.build(seed)
    optimizer = make_optimizer(case, task, model, lr, comm, steps)
    # a method may train at a multiple of the rate
    rate = LearningRate(optimizer.param_groups[0]["lr"], steps, steps // 20)
    random, scores = np.random.default_rng((seed, comm.rank)), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        batch = task.draw(random, comm.rank, comm.size)
        optimizer.zero_grad()
        task_loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        if (step + 1) % task.evaluated == 0:
            scores.append(_score(task, model, optimizer, comm))
    sent = float(optimizer.traffic.total.bytes_sent)
    elements = sum(one.numel() for one in model.parameters())
    return {"scores": scores, "bytes": comm.allreduce(sent, "mean"), "elements": elements}


def _score(task: Task, model: torch.nn.Module, optimizer: object, comm: Communicator) -> float:
    common = getattr(optimizer, "common_model", None)
    if common is None:  # of an optimizer whose ranks hold one model, between local steps too
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.synchronize()
        return task.evaluate(model) if comm.rank == 0 else 0.0
    with common():
        return task.evaluate(model) if comm.rank == 0 else 0.0


def run(case: Case, lr: float, seed: int, steps: int) -> Record:
    """Train on ranks that are threads, which send the bytes of processes; return rank 0's record.

    The record of a training that ends in NaN has the score of that.
    """
    torch.set_num_threads(1)

    def rank(comm: Communicator) -> Record:
        return train(comm, case, lr, seed, steps)

    try:
        return run_local(case.ranks, rank, case.topology, timeout=TIMEOUT_S)[0]
    except NonFiniteGradient:
        task = TASKS[case.task]
        return {"scores": [task.of_divergence] * (steps // task.evaluated), "bytes": 0.0, "elements": 0}


def kept(results: Results, case: Case, lr: float, seed: int, steps: int, deadline: float) -> Record:
    """Return the record of a run, made if it is missing and the deadline has not passed; otherwise an empty one."""
    settings = {"definition": case.definition, "task": case.task, "method": case.method, "lr": lr, "seed": seed}
    settings |= {"local_steps": case.local_steps, "steps": steps, "ranks": case.ranks, "topology": case.topology}
    settings |= {} if case.outer is None else {"outer": list(case.outer)}
    name = name_of(settings)
    known = results.kept(name, settings)
    if known is None and time.time() > deadline:
        return {}
    return known or results.get(name, settings, partial(run, case, lr, seed, steps))


def name_of(settings: Record) -> str:
    """Return the name of a run in files."""
    name = "{task}-{}-{local_steps}-{ranks}-{topology}-{lr:g}-{steps}-{seed}".format(
        slug(settings["method"]), **settings
    )
    return "-".join((name, *(f"{one:g}" for one in settings.get("outer", ()))))


def tuned_pairs(results: Results, cases: Iterable[Case], rates: Rates, deadline: float) -> Mapping[str, Pair]:
    """Return the best pair of an outer optimizer, of each method with one of which all pairs have been tried."""
    tried: dict[tuple[Case, float], Run] = {}
    for case in cases:
        lr = rates.get((case.base, 10))
        if case.method != case.base and lr is not None:
            for pair in OUTER_PAIRS:
                short, steps = Case(case.task, case.method, 10, outer=pair), TASKS[case.task].tuning_steps
                tried[short, lr] = partial(kept, results, short, lr, TUNING_SEED, steps, deadline)
    scores: dict[str, dict[Pair, float]] = {}
    for (short, _), record in run_parallel(tried).items():
        if record and short.outer is not None:
            scores.setdefault(short.method, {})[short.outer] = record["scores"][-1]
    return {
        method: choose(TASKS[next(iter(cases)).task], each)
        for method, each in scores.items()
        if len(each) == len(OUTER_PAIRS)
    }


def tuned(results: Results, cases: Iterable[Case], deadline: float) -> Rates:
    """Return the best rate of each method of which all rates have been tried."""
    found: dict[tuple[str, int], float] = {}
    tried: dict[tuple[Case, float], Run] = {}
    for case in cases:
        task = TASKS[case.task]
        short = Case(case.task, case.method, case.tuned_at)
        tried |= {
            (short, lr): partial(kept, results, short, lr, TUNING_SEED, task.tuning_steps, deadline)
            for lr in task.rates
        }
    made = run_parallel(tried)
    for case in {short: None for short, _ in made}:
        task = TASKS[case.task]
        scores = {lr: record["scores"][-1] for (one, lr), record in made.items() if one == case and record}
        if len(scores) == len(task.rates):
            found[case.method, case.tuned_at] = choose(task, scores)
    return found


def choose(task: Task, scores: Mapping[Tried, float]) -> Tried:
    """Return the choice with the best score; scores that are not finite count only if all are."""
    finite = {one: score for one, score in scores.items() if np.isfinite(score)} or dict(scores)
    return (min if task.lower_is_better else max)(finite, key=lambda one: finite[one])


def study(results: Results, task: str, seeds: int, minutes: float) -> Record:
    """Add runs of a task to the record; return it."""
    deadline = time.time() + 60 * minutes
    adopt(results, RECORD)
    every, rates = cases_of(task), dict[tuple[str, int], float]()
    for cases in (every[first : first + BLOCK] for first in range(0, len(every), BLOCK)):
        rates |= tuned(results, [case for case in cases if case.method == case.base], deadline)
        pairs = tuned_pairs(results, cases, rates, deadline)
        cases = [replace(case, outer=pairs.get(case.method)) for case in cases]
        ready = {case: rates.get((case.base, case.tuned_at)) for case in cases}
        run_parallel(
            {
                (case, seed): partial(kept, results, case, lr, seed, TASKS[task].steps, deadline)
                for seed in range(seeds)
                for case, lr in ready.items()
                if lr is not None and (case.method == case.base or case.outer is not None)
            }
        )
    return {"runs": [read_record(path) for path in sorted(results.folder.glob("*.json"))]}


def adopt(results: Results, record: Path) -> None:
    """Write the runs of a committed record that the folder lacks, so that they are not made again."""
    for one in read_record(record)["runs"] if record.exists() else ():
        path = results.folder / f"{name_of(one['settings'])}.json"
        if not path.exists():
            write_record(path, one)
