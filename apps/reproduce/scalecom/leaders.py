"""ScaleCom's Figure 3 and Lemma 1: how much of the true top-k the leader's choice has, and what it loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.networks import Task, train
from apps.reproduce.parallel import side_by_side
from apps.reproduce.results import Book
from apps.reproduce.scalecom.memories import EVERY, MODEL, SAME, length, plotted
from apps.train.training import Training
from collectives import Communicator
from mpicomp import ScaleCom
from mpicomp.algorithms.scalecom import ScaleComAggregator
from mpicomp.diagnostics import contraction, contraction_bound, gather_rows, missed, top_k

CHANCE = 10  # times as many of the true largest must be hit
LEARNING_RATE, RATE = 0.1, 400


def leaders(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Figure 3, Lemma 1: how much of the true top-k the leader's choice has, and what it loses."""
    many, epochs = seeds if full else min(seeds, 2), 36 if full else 4
    ranks = (2, 4, 8)
    jobs = [
        partial(_recorded, book, Task((*MODEL, *length(epochs, m)), m), seed) for m in ranks for seed in range(many)
    ]
    done = iter(side_by_side(jobs))
    found = {f"{m} ranks": [next(done) for _ in range(many)] for m in ranks}
    everything = [record for records in found.values() for record in records]
    means = {name: float(np.mean([record["missed"] for record in records])) for name, records in found.items()}
    shares = [1 - float(np.mean(record["missed"])) for record in everything]
    least = min(shares) / (1 / RATE)
    gamma, best, bound = (np.concatenate([record[key] for record in everything]) for key in ("gamma", "best", "bound"))
    within = float(np.mean(gamma <= bound))
    differs = f"{SAME}, learning rate 0.1, {RATE}x, the whole vector compared, first {epochs} epochs, {many} seeds"
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
        plotted(book, "leaders", found, "missed", "d/k"),
        _contraction_plot(book, found["4 ranks"]),
    ]


def _contraction_plot(book: Book, records: list[Record]) -> Path:
    names = {"bound": "bound of Lemma 1", "gamma": "leader's choice", "best": "true top-k"}
    lines = [Curve(name, records[0]["step"], [record[key] for record in records]) for key, name in names.items()]
    return curves(book.folder / "contraction.png", lines, "step", "part of the squared length that is lost (4 ranks)")


def _recorded(book: Book, task: Task, seed: int) -> Record:
    method, own = ScaleCom(rate=RATE, exact=True), ("--lr", str(LEARNING_RATE))
    settings = {"options": [*task.options, *own], "method": repr(method), "ranks": task.ranks, "seed": seed}
    return book.record(f"leaders-{task.ranks}-{seed}", settings, lambda: choices(method, task, seed, own))


def choices(method: ScaleCom, task: Task, seed: int, own_options: Sequence[str] = ()) -> Record:
    """How good the leaders' choices are in the course of a run.

    Returns
    -------
    dict
        ``count``: of elements. Lists, one entry each `EVERY` steps: ``step``; ``missed``: d/k, the part of the chosen
        elements that are not among the k largest of the exact mean; ``gamma``: the part of its squared length that
        the choice loses; ``best``: that the k largest lose; ``bound``: Lemma 1's.
    """
    studied = Studied(**{field.name: getattr(method, field.name) for field in fields(method)})
    found: Record = {}

    def watch(comm: Communicator, training: Training) -> None:
        if comm.rank == 0:
            found.update(training.optimizer.aggregators[0].seen, count=training.n_parameters)  # type: ignore[attr-defined]

    train(task, studied, seed, own_options, watch)
    return found


@dataclass(frozen=True)
class Studied(ScaleCom):
    """ScaleCom that is looked at each `EVERY` steps."""

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> StudiedAggregator:
        """See `Algorithm.start`."""
        return StudiedAggregator(self, comm, n, dtype, vector_id, tensor_lengths)


class StudiedAggregator(ScaleComAggregator):
    """Keeps in `seen`, on rank 0, what `choices` returns."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: dict[str, list[float]] = {key: [] for key in ("step", "missed", "gamma", "best", "bound")}

    def aggregate(self, vector: Any, out: Any = None) -> Any:
        """See `Aggregator.aggregate`."""
        if self.step % EVERY or self.step < self.options.warmup_steps:
            return super().aggregate(vector, out)
        step = self.step
        exact = gather_rows(self.comm, vector + self.residual).mean(axis=0, dtype=np.float64)
        result = super().aggregate(vector, out)
        if self.comm.rank == 0:
            true = top_k(exact, self.places.size)
            part, best = missed(self.places, true), contraction(exact, true)
            bound = contraction_bound(part, best)
            values = (step, part, contraction(exact, self.places), best, bound)
            for entries, value in zip(self.seen.values(), values, strict=True):
                entries.append(value)
        return result
