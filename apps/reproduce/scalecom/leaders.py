"""Figure 3 and Lemma 1 of ScaleCom: the overlap of the leader's choice with the true top-k, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.networks import Task, train
from apps.reproduce.scalecom.memories import EVERY, MODEL, SAME, length, plot, recorded
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results
from apps.train.training import Training
from collectives import Communicator
from mpicomp import ScaleCom
from mpicomp.diagnostics import contraction, contraction_bound, gather_rows, missed, top_k
from mpicomp.torch import DistributedOptimizer

CHANCE = 10  # the choice must hit the true largest elements so many times as often as a random one
LEARNING_RATE, RATE = 0.1, 400
RANKS = (2, 4, 8)


def leaders(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Look at the choices of leaders in training runs on 2, 4 and 8 ranks."""
    many, epochs = seeds if full else min(seeds, 2), 36 if full else 4

    def make(name: str, seed: int) -> Run:
        ranks = int(name.partition(" ")[0])
        task = Task((*MODEL, *length(epochs, ranks)), ranks)
        method = ScaleCom(rate=RATE, exact=True)
        return partial(recorded, results, f"leaders-{ranks}", choices, method, task, seed, LEARNING_RATE)

    found = run_seeds([f"{ranks} ranks" for ranks in RANKS], many, make)
    everything = [record for records in found.values() for record in records]
    means = {name: float(np.mean([record["missed"] for record in records])) for name, records in found.items()}
    shares = [1 - float(np.mean(record["missed"])) for record in everything]
    least = min(shares) / (1 / RATE)
    gamma, best, bound = (np.concatenate([record[key] for record in everything]) for key in ("gamma", "best", "bound"))
    within = float(np.mean(gamma <= bound))
    differs = f"{SAME}, learning rate 0.1, {RATE}x, the whole vector compared, first {epochs} epochs, {many} seeds"
    names = {"bound": "bound of Lemma 1", "gamma": "leader's choice", "best": "true top-k"}
    of_four = found["4 ranks"]
    losses = [Curve(name, of_four[0]["step"], [record[key] for record in of_four]) for key, name in names.items()]
    label = "part of the squared length that is lost (4 ranks)"
    return [
        Claim(
            "Fig. 3",
            f"the leader's top-k overlaps the true one: at least {CHANCE} times chance",
            "0.2 to 0.4 of it, at 400x",
            f"{min(shares):.2f} to {max(shares):.2f}: {least:.0f} times chance at least",
            least >= CHANCE,
            differs + "; mean over steps, least of all runs",
        ),
        Claim(
            "Fig. 3",
            "d/k lies between 0.6 and 0.8",
            "0.6 to 0.8",
            ", ".join(f"{value:.2f} with {name}" for name, value in means.items()),
            None,
            differs + "; reported: lower is better",
        ),
        Claim(
            "Lemma 1",
            "the choice loses no more than d/k + (1 − d/k) γ₀ of the squared length",
            "γ below the bound",
            f"γ {gamma.mean():.2f}, bound {bound.mean():.2f}, γ₀ {best.mean():.2f}; within it at {100 * within:.1f} % "
            f"of {gamma.size} looks",
            within == 1.0,
            differs,
        ),
    ], [
        plot(results, "leaders", found, "missed", "d/k"),
        curves(results.folder / "contraction.png", losses, "step", label),
    ]


def choices(method: ScaleCom, task: Task, seed: int, own_options: Sequence[str] = ()) -> Record:
    """Measure the quality of the leaders' choices in the course of a run with ``beta`` 1.

    Returns
    -------
    dict
        ``count``: number of elements. Lists with an entry for each `EVERY` steps: ``step``; ``missed``: d/k, the part
        of the chosen elements that are not among the k largest of the exact mean; ``gamma``: the part of its squared
        length that the choice loses; ``best``: the part that the k largest lose; ``bound``: the bound of Lemma 1.
    """
    if method.beta != 1:
        raise ValueError(f"residuals show what the ranks would have averaged only with beta 1, not {method.beta}")
    found: Record = {key: [] for key in ("step", "missed", "gamma", "best", "bound")}

    def watch(comm: Communicator, training: Training) -> None:
        optimizer = training.optimizer
        assert isinstance(optimizer, DistributedOptimizer)
        step, (aggregator,) = training.step - 1, optimizer.aggregators
        if step % EVERY or step < method.warmup_steps:
            return
        # With beta 1, the residuals are the values that the ranks would have averaged, except for the chosen elements.
        # These are 0 in the residuals, and the gradients hold their mean.
        parameters, (names,) = dict(training.model.named_parameters()), optimizer.buckets
        result = torch.cat([parameters[name].grad.reshape(-1) for name in names]).numpy()  # type: ignore[union-attr]
        assert aggregator.residual is not None
        exact = gather_rows(comm, aggregator.residual).mean(axis=0, dtype=np.float64) + result
        if comm.rank == 0:
            chosen = np.flatnonzero(result)
            true = top_k(exact, chosen.size)
            part, best = missed(chosen, true), contraction(exact, true)
            values = (step, part, contraction(exact, chosen), best, contraction_bound(part, best))
            for entries, value in zip(found.values(), values, strict=True):
                entries.append(value)

    record = train(task, method, seed, own_options, watch)
    return {**found, "count": record["count"]}
