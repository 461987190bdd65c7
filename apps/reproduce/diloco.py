"""DiLoCo (Douillard et al., arXiv 2311.08105) in one bit: local steps, an outer optimizer, and Marsit between ranks.

A character model is trained with AdamW inside, on the same batches for every method. After H steps on each rank the
updates are averaged: in full precision, by Marsit, or by Marsit with two winners. On a seed that only tuning uses,
learning rates are tuned for the exact mean, and outer optimizers for the exact mean and for Marsit. With H = 1 the
methods show the cost of local steps, and that of one bit without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.pipeline.model import Shape, loss, slice_of
from apps.pipeline.text import Corpus, load
from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.studies.parallel import Run, run_parallel, run_seeds
from apps.studies.results import Results, slug
from apps.studies.tuning import climb
from apps.train.learning_rate import LearningRate
from collectives import Communicator
from collectives.annotations import Array
from collectives.threads.run_local import run_local
from mpicomp import Dense, Marsit
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedOptimizer

RANKS, BATCH, SEEDS = 4, 4, 3
STEPS, STEPS_FULL, STEPS_QUICK = 600, 2400, 120
"""Multiples of every H and of `EVALUATED`."""
EVALUATED = 120
CHARACTERS = 200_000
SHAPE = Shape(layers=2, width=80)
LEARNING_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
FIRST = 2e-3
TUNING_SEED = 1000  # of the runs that choose a learning rate or an outer optimizer, and of no others
PLAIN = (1.0, 0.0)
"""Outer step size and momentum of the mean update as it is."""
OUTERS = (PLAIN, (0.5, 0.6), (0.7, 0.6), (0.7, 0.9))
"""Outer step sizes and momentums that are tried."""
GRADIENTS, DENSE, MARSIT, WINNERS = "mean gradients", "dense", "Marsit", "2 winners"
# gamma 2 instead of 4, the default: 4 ended 0.17 nats higher after 600 steps with H = 10 at a rate of 0.002
ALGORITHMS: Mapping[str, Algorithm] = {
    GRADIENTS: Dense(),
    DENSE: Dense(),
    MARSIT: Marsit(None, gamma=2.0, clip=1.0),
    WINNERS: Marsit(None, gamma=2.0, clip=1.0, winners=2),
}
PERIODS = (10, 30)
MARGINS = {10: 0.03, 30: 0.06}
"""Nats a character that one bit may lose to the exact mean of the same local steps, for each H."""


@dataclass(frozen=True)
class Case:
    """A method with its local steps, learning rate and outer optimizer."""

    method: str
    local_steps: int
    lr: float = FIRST
    outer: tuple[float, float] = PLAIN

    @property
    def title(self) -> str:
        """Method and H."""
        return f"{self.method}, H = {self.local_steps}"


EXACT = (Case(GRADIENTS, 1, 4e-3), *(Case(DENSE, period) for period in PERIODS))
Runs = Mapping[Case, Sequence[Record]]
"""Records of the runs of each case, by seed."""


def train(comm: Communicator, corpus: Corpus, case: Case, seed: int, steps: int) -> Record:
    """Train one rank's replica; collective. Returns the record of `train_replica`."""
    options: dict[str, Any] = {"synchronize": "updates", "local_steps": case.local_steps, "outer": case.outer}
    if case.method == GRADIENTS:
        options = {"synchronize": "gradients"}
    return train_replica(comm, corpus, ALGORITHMS[case.method], options, case.lr, seed, steps)


def train_replica(
    comm: Communicator,
    corpus: Corpus,
    algorithm: Algorithm,
    options: Mapping[str, Any],
    lr: float,
    seed: int,
    steps: int,
) -> Record:
    """Train one rank's replica by a method and options of the optimizer; collective.

    Returns
    -------
    dict
        ``losses``: held-out, in nats a character, of the common model after every `EVALUATED` steps. ``bytes``: sent by
        all synchronizations, mean over ranks. ``elements``: of the model.
    """
    model = slice_of(SHAPE, 0, 1, seed)
    inner = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)
    # without overlap, so that ranks that are threads need no further threads
    optimizer = DistributedOptimizer(inner, algorithm, comm, **options, overlap=False)
    rate = LearningRate(lr, steps, steps // 20)
    random, losses = np.random.default_rng((seed, comm.rank)), []
    for step in range(steps):
        inner.param_groups[0]["lr"] = rate(step)
        step_on_batch(model, optimizer, corpus, random.integers(0, len(corpus.training), BATCH))
        if (step + 1) % EVALUATED == 0:
            with optimizer.common_model():
                losses.append(held_out(model, corpus) if comm.rank == 0 else 0.0)
    return make_record(comm, optimizer, model, losses)


def step_on_batch(model: torch.nn.Module, optimizer: DistributedOptimizer, corpus: Corpus, chosen: Array) -> None:
    """Make a step on the chosen sequences of the training part."""
    rows = torch.from_numpy(corpus.training[chosen])
    optimizer.zero_grad()
    loss(model(rows[:, :-1]), rows[:, 1:]).backward()
    optimizer.step()


def make_record(
    comm: Communicator, optimizer: DistributedOptimizer, model: torch.nn.Module, losses: list[float]
) -> Record:
    """Return the losses, the mean over ranks of the sent bytes, and the model's elements; collective."""
    sent = sum(aggregator.traffic.total.bytes_sent for aggregator in optimizer.aggregators or ())
    mean = comm.allreduce(float(sent), "mean")
    return {"losses": losses, "bytes": mean, "elements": sum(one.numel() for one in model.parameters())}


@torch.no_grad()
def held_out(model: torch.nn.Module, corpus: Corpus) -> float:
    """Return the mean loss of the held-out text."""
    rows = torch.from_numpy(corpus.validation)
    return float(loss(model(rows[:, :-1]), rows[:, 1:]))


def run(case: Case, seed: int, steps: int) -> Record:
    """Train on ranks that are threads, which send the bytes of processes; return rank 0's record."""
    torch.set_num_threads(1)
    corpus = load(None, CHARACTERS, SHAPE.context)

    def rank(comm: Communicator) -> Record:
        torch.set_num_threads(1)  # of this thread: the ranks are the parallel part
        return train(comm, corpus, case, seed, steps)

    return run_local(RANKS, rank, "ring", timeout=600)[0]


def kept(results: Results, case: Case, seed: int, steps: int) -> Record:
    """Return the record of a run from the folder of results, and make a missing one."""
    settings = {"algorithm": repr(ALGORITHMS[case.method]), "local_steps": case.local_steps, "lr": case.lr}
    settings |= {"outer": case.outer, "steps": steps, "shape": repr(SHAPE), "ranks": RANKS, "batch": BATCH}
    settings |= {"characters": CHARACTERS, "warmup_steps": steps // 20}
    eta, mu = case.outer
    name = f"{slug(case.method)}-{case.local_steps}-{case.lr:g}-{eta:g}-{mu:g}-{steps}-{seed}"
    return results.get(name, settings, partial(run, case, seed, steps))


def study(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Tune learning rates, then outer optimizers; train by every method, and compare losses and bytes."""
    steps = STEPS_FULL if full else STEPS
    cases = with_marsit(tune_rates(results, EXACT, steps))
    local, claims = tune_outer(results, [case for case in cases if case.local_steps > 1], steps)
    cases = [*(case for case in cases if case.local_steps == 1), *local]
    found, figures = compare_all(results, with_winners(cases), min(seeds, SEEDS), steps, "tuned on another seed")
    return [*found, *claims], figures


def quick(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train by every method for a short time, at one learning rate and without an outer optimizer."""
    return compare_all(results, with_winners(with_marsit(EXACT)), seeds, STEPS_QUICK, "not tuned")


def tune_rates(results: Results, cases: Sequence[Case], steps: int) -> list[Case]:
    """Return the cases with their best learning rates."""
    by_title = {case.title: case for case in cases}

    def make(title: str, lr: float) -> Run:
        return partial(kept, results, replace(by_title[title], lr=lr), TUNING_SEED, steps)

    rates = climb(LEARNING_RATES, {title: case.lr for title, case in by_title.items()}, make, score)
    return [replace(case, lr=rates[title]) for title, case in by_title.items()]


def tune_outer(results: Results, cases: Sequence[Case], steps: int) -> tuple[list[Case], list[Claim]]:
    """Return the cases with the best of `OUTERS` at their learning rates, and a line on those that were tried."""
    tried = {case: [replace(case, outer=outer) for outer in OUTERS] for case in cases}
    runs = {one: partial(kept, results, one, TUNING_SEED, steps) for ones in tried.values() for one in ones}
    found = run_parallel(runs)
    best = [max(ones, key=lambda one: score(found[one])) for ones in tried.values()]
    claims = []
    for case, ones in tried.items():
        losses = ", ".join(f"({one.outer[0]:g}, {one.outer[1]:g}) {found[one]['losses'][-1]:.3f}" for one in ones)
        what = f"{case.title}: outer step size and momentum (η, μ), and held-out loss"
        differs = (
            f"one seed, which is used for tuning alone, {steps} steps, learning rate {case.lr:g}; Nesterov momentum"
        )
        claims.append(Claim("–", what, "(0.7, 0.9) with H = 500", losses, None, differs))
    return best, claims


def with_marsit(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, and at the same learning rates mean updates of single steps, and Marsit."""
    exact = [*cases, *(replace(case, method=DENSE) for case in cases if case.method == GRADIENTS)]
    return [*exact, *(replace(case, method=MARSIT) for case in exact if case.method == DENSE)]


def with_winners(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, and each of Marsit with local steps also with two winners, at the same settings."""
    local = [case for case in cases if case.method == MARSIT and case.local_steps > 1]
    return [*cases, *(replace(case, method=WINNERS) for case in local)]


def score(record: Record) -> float:
    """Return the last loss with the sign of a score, or minus infinity if it is not finite."""
    end = float(record["losses"][-1])
    return -end if np.isfinite(end) else -np.inf


def compare_all(
    results: Results, cases: Sequence[Case], seeds: int, steps: int, tuning: str
) -> tuple[list[Claim], list[Path]]:
    """Train all cases with these seeds, and compare losses and bytes."""
    found = run_seeds(cases, seeds, lambda case, seed: partial(kept, results, case, seed, steps))
    return judge(found, steps, tuning), draw(found, results.folder)


def judge(found: Runs, steps: int, tuning: str) -> list[Claim]:
    """Compare the last losses of one bit and of the exact mean, and of local steps and mean gradients."""
    by_title = {case.title: case for case in found}

    def of(method: str, local_steps: int) -> Case:
        return by_title[Case(method, local_steps).title]

    def compare(what: str, ours: Case, theirs: Case, margin: float | None) -> Claim:
        gap = paired(*([record["losses"][-1] for record in found[case]] for case in (ours, theirs)))
        words = [
            f"{np.mean([record['losses'][-1] for record in found[case]]):.3f} nats and "
            f"{np.mean([record['bytes'] for record in found[case]]) / 1e6:.3g} MB sent per rank"
            for case in (ours, theirs)
        ]
        here = f"{words[0]}, against {words[1]}; difference {gap} nats"
        settings = "; ".join(
            f"{case.title}: learning rate {case.lr:g}, (η, μ) = {case.outer}" for case in (ours, theirs)
        )
        judged = f"; judged: surely less than {margin} nats above" if margin else ""
        holds = None if margin is None else gap.most < margin
        return Claim("–", what, "–", here, holds, f"{settings}, {tuning}{judged}")

    gradients, dense, marsit = of(GRADIENTS, 1), of(DENSE, 1), of(MARSIT, 1)
    claims = []
    for period, margin in MARGINS.items():
        for method in (MARSIT, WINNERS):
            what = f"H = {period}: {method} ends within {margin} nats of the dense average of the same local steps"
            claims.append(compare(what, of(method, period), of(DENSE, period), margin))
    claims.append(compare("H = 1: the cost of one bit", marsit, dense, None))
    claims.append(compare("H = 1: the cost of AdamW on each rank", dense, gradients, None))
    few, many = PERIODS
    what = f"one bit every {few} steps, against the exact mean every {many}"
    claims.append(compare(what, of(MARSIT, few), of(DENSE, many), None))
    for period in PERIODS:
        what = f"H = {period}: the cost of local steps, averaged in full"
        claims.append(compare(what, of(DENSE, period), gradients, None))
        what = f"H = {period}: the cost of local steps and of one bit together"
        claims.append(compare(what, of(MARSIT, period), gradients, None))
    model = (
        f"character model of {found[gradients][0]['elements']:,} elements, {steps} steps of {BATCH} sequences of "
        f"{SHAPE.context} characters a rank, {RANKS} ranks, {len(found[gradients])} seeds, AdamW inside, constant rates"
    )
    claims[0] = replace(claims[0], differs=f"{model}; {claims[0].differs}; all rows: the same model and batches")
    return claims


def draw(found: Runs, folder: Path) -> list[Path]:
    """Draw held-out loss against steps, a figure for each H."""
    paths = []
    for period in PERIODS:
        lines = []
        for case, records in found.items():
            if case.local_steps in (1, period):
                losses = [record["losses"] for record in records]
                lines.append(Curve(case.title, range(EVALUATED, EVALUATED * len(losses[0]) + 1, EVALUATED), losses))
        paths.append(curves(folder / f"losses-{period}.png", lines, "step", "held-out loss, nats a character"))
    return paths


PARTS = (study,)
QUICK = (quick,)
