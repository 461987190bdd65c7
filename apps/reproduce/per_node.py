"""Nodes: full precision inside, Marsit between them, against Marsit among all ranks. No paper has such a table.

A perceptron is trained on `RANKS` ranks with the settings of the learning tables, on digits and on Fashion-MNIST. Runs
of the same seed share weights and the order of images, so that differences to the dense all-reduce are paired.

Two controls separate the causes of a loss with Adam. *K = 1* averages the ranks' updates in full precision, so that its
loss is that of an optimizer on each rank. *Islands* average gradients within a node at every step, so that each node
has in effect one optimizer. With momentum, which is linear, `vote_errors` has the error of one bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.marsit.fixed_rates import DENSE, GLOBAL_BATCH, OPTIONS, RATES, Runs, lost
from apps.reproduce.networks import Task, trained
from apps.reproduce.vote_errors import EVERY, FIRST, STEPS, measure
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results, slug
from mpicomp import Dense, Marsit, PerNode
from mpicomp.algorithms import Algorithm

RANKS, RANKS_PER_NODE = 8, 2
SEEDS, SEEDS_FULL = 3, 5
PAIRS = {"Marsit, K = 100": "per node, K = 100", "Marsit, K = none": "per node, K = none"}
"""Marsit among all ranks, and the same between nodes; without --full the first pair alone."""
MEAN_OF_UPDATES, ISLANDS = "K = 1", "islands, K = 100"
CONTROLS = (MEAN_OF_UPDATES, ISLANDS)
"""Trained with Adam alone: with momentum, which is linear, the mean of updates is the update of the mean gradient."""
METHODS: Mapping[str, Algorithm] = {
    DENSE: Dense(),
    "Marsit, K = 100": Marsit(100),
    "per node, K = 100": PerNode(Marsit(100)),
    "Marsit, K = none": Marsit(None),
    "per node, K = none": PerNode(Marsit(None)),
    MEAN_OF_UPDATES: Marsit(1),
    ISLANDS: Marsit(100),
}
Rate = tuple[str, float]
"""Optimizer and learning rate."""


@dataclass(frozen=True)
class Grid:
    """Cells of the learning tables: a dataset, the images of its test split, and the rates that are tried."""

    dataset: str
    test_images: int
    rates: Sequence[Rate]
    rates_full: Sequence[Rate] = RATES

    @property
    def task(self) -> Task:
        """Training run with the settings of the learning tables."""
        batch = str(GLOBAL_BATCH[self.dataset] // RANKS)
        options = ("--dataset", self.dataset, "--batch", batch, *OPTIONS[self.dataset])
        return Task(options, RANKS, ranks_per_node=RANKS_PER_NODE)


DIGITS = Grid("digits", 360, RATES)
FASHION_MNIST = Grid("fashion-mnist", 10_000, (("adam", 0.001),))
"""Without --full the rate alone at which Marsit loses most."""


def digits(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Compare on digits."""
    return _compare(results, DIGITS, seeds, full), []


def fashion_mnist(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Compare on Fashion-MNIST."""
    return _compare(results, FASHION_MNIST, seeds, full), []


def vote_errors(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Report the parts of a vote's error on Fashion-MNIST, at the rates at which Marsit loses most; full: at all."""
    rates, seeds = RATES if full else (("momentum", 0.2), ("adam", 0.001)), min(seeds, SEEDS)
    make = partial(_measure, results)
    return [_vote(rate, records) for rate, records in run_seeds(rates, seeds, make).items()], []


def _measure(results: Results, rate: Rate, seed: int) -> Run:
    return partial(measure, results, FASHION_MNIST.dataset, rate, RANKS, RANKS_PER_NODE, seed)


def _vote(rate: Rate, records: Sequence[Record]) -> Claim:
    parts = {key: np.mean([record[key] for record in records], axis=0) for key in ("ranks", "nodes")}
    text = {key: f"{noise:.2f} + {magnitude:.2f}" for key, (noise, magnitude) in parts.items()}
    what = f"{rate[0]} {rate[1]:g}: squared error of one vote, relative to the mean's square: noise + one magnitude"
    differs = (
        f"{FASHION_MNIST.dataset}, first layer of the perceptron, {RANKS} ranks, {RANKS_PER_NODE} a node, every "
        f"{EVERY}th of steps {FIRST} to {STEPS} at a constant rate with exact means, {len(records)} seeds; reported"
    )
    return Claim("–", what, "–", f"among ranks {text['ranks']}, between nodes {text['nodes']}", None, differs)


def _compare(results: Results, grid: Grid, seeds: int, full: bool) -> list[Claim]:
    pairs = PAIRS if full else dict(list(PAIRS.items())[:1])
    rates = grid.rates_full if full else grid.rates
    found = train_all(results, grid, rates, min(seeds, SEEDS_FULL if full else SEEDS), pairs)
    return [*judge(found, grid, rates, pairs), *explain(found, grid, rates)]


def train_all(
    results: Results, grid: Grid, rates: Sequence[Rate], seeds: int, pairs: Mapping[str, str] = PAIRS
) -> Runs:
    """Train dense, the methods of the pairs and the controls at each rate, or read their results if they are there."""

    def make(case: tuple[str, float, str], seed: int) -> Run:
        optimizer, lr, method = case
        name = f"{grid.dataset}-{RANKS}-{optimizer}-{lr:g}-{slug(method).replace('=-', '')}"
        task = replace(grid.task, islands=method == ISLANDS)
        own_options = ("--optimizer", optimizer, "--lr", f"{lr:g}")
        return partial(trained, results, name, task, METHODS[method], seed, own_options)

    return run_seeds([(*rate, method) for rate in rates for method in methods_at(rate, pairs)], seeds, make)


def methods_at(rate: Rate, pairs: Mapping[str, str]) -> list[str]:
    """Return the methods that are trained at a rate: dense, those of the pairs, and with Adam the controls."""
    methods = [DENSE, *(method for pair in pairs.items() for method in pair)]
    return [*methods, *CONTROLS] if rate[0] == "adam" else methods


def judge(found: Runs, grid: Grid, rates: Sequence[Rate], pairs: Mapping[str, str]) -> list[Claim]:
    """Compare the losses of accuracy in each cell, and over all cells."""
    differs = (
        f"{_settings(found, grid, rates)}, points above dense at the same rate; one image is "
        f"{100 / grid.test_images:.2f} points; means are judged"
    )
    claims = []
    for flat, nodes in pairs.items():
        pooled: dict[str, list[float]] = {flat: [], nodes: []}
        for rate in rates:
            points = {method: lost(found, *rate, method) for method in (flat, nodes)}
            for method, values in pooled.items():
                values += points[method]
            what = f"{rate[0]} {rate[1]:g}: {nodes} loses at most half as much as Marsit among all ranks"
            claims.append(_cell(what, points[flat], points[nodes], differs))
        if len(rates) > 1:
            what = f"all rates: {nodes} loses at most half as much"
            claims.append(_cell(what, pooled[flat], pooled[nodes], "the same runs, all rates together"))
    return claims


def explain(found: Runs, grid: Grid, rates: Sequence[Rate]) -> list[Claim]:
    """Report the losses of the controls, and their differences to the first pair of methods."""
    flat, nodes = next(iter(PAIRS.items()))
    differs = f"{_settings(found, grid, rates)}; reported"
    claims = []
    for rate in rates:
        if rate[0] != "adam":
            continue
        points = {method: lost(found, *rate, method) for method in (flat, nodes, *CONTROLS)}
        no_loss = [0.0] * len(points[flat])
        for control, other, what in (
            (MEAN_OF_UPDATES, flat, "the mean of updates in full precision, among all ranks"),
            (ISLANDS, nodes, "gradients averaged in a node, Marsit between nodes"),
        ):
            here = (
                f"{paired(points[control], no_loss)} to dense; {other} less {control} "
                f"{paired(points[other], points[control])}"
            )
            claims.append(Claim("–", f"{rate[0]} {rate[1]:g}: {control}, {what}", "–", here, None, differs))
    return claims


def _settings(found: Runs, grid: Grid, rates: Sequence[Rate]) -> str:
    seeds = len(found[(*rates[0], DENSE)])
    return (
        f"{grid.dataset}, a perceptron of one hidden layer, {RANKS} ranks, {RANKS_PER_NODE} a node, cosine decay, "
        f"{seeds} seeds"
    )


def _cell(what: str, flat: Sequence[float], nodes: Sequence[float], differs: str) -> Claim:
    """Judge one cell; there is nothing to halve where Marsit loses nothing."""
    loses = float(np.mean(flat)) < 0
    here = f"{np.mean(nodes):+.2f}, Marsit among all ranks {np.mean(flat):+.2f}; difference {paired(nodes, flat)}"
    holds = float(np.mean(nodes)) >= float(np.mean(flat)) / 2 if loses else None
    return Claim("–", what, "–", here, holds, differs)


PARTS = (digits, fashion_mnist, vote_errors)
