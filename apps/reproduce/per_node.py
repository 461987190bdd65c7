"""Nodes: full precision inside, Marsit between them, against Marsit among all ranks. No paper has such a table.

A perceptron on digits is trained on `RANKS` ranks with the settings of the learning tables. Runs of the same seed share
weights and the order of images, so that differences to the dense all-reduce are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from apps.reproduce.claims import Claim, paired
from apps.reproduce.marsit.fixed_rates import DENSE, GLOBAL_BATCH, OPTIONS, RATES, Runs, lost
from apps.reproduce.networks import Task, trained
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results, slug
from mpicomp import Dense, Marsit, PerNode
from mpicomp.algorithms import Algorithm

RANKS, RANKS_PER_NODE = 8, 2
SEEDS, SEEDS_FULL = 3, 5
DATASET = "digits"
TASK = Task(
    ("--dataset", DATASET, "--batch", str(GLOBAL_BATCH[DATASET] // RANKS), *OPTIONS[DATASET]),
    RANKS,
    ranks_per_node=RANKS_PER_NODE,
)
PAIRS = {"Marsit, K = 100": "per node, K = 100", "Marsit, K = none": "per node, K = none"}
"""Marsit among all ranks, and the same between nodes; without --full the first pair alone."""
METHODS: Mapping[str, Algorithm] = {
    DENSE: Dense(),
    "Marsit, K = 100": Marsit(100),
    "per node, K = 100": PerNode(Marsit(100)),
    "Marsit, K = none": Marsit(None),
    "per node, K = none": PerNode(Marsit(None)),
}


def accuracy(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train all methods at all rates, and compare the losses of accuracy of each pair."""
    pairs = PAIRS if full else dict(list(PAIRS.items())[:1])
    return judge(train_all(results, min(seeds, SEEDS_FULL if full else SEEDS), pairs), pairs), []


def train_all(results: Results, seeds: int, pairs: Mapping[str, str]) -> Runs:
    """Train dense and the methods of the pairs at each rate, or read their results if they are there."""

    def make(case: tuple[str, float, str], seed: int) -> Run:
        optimizer, lr, method = case
        name = f"{DATASET}-{RANKS}-{optimizer}-{lr:g}-{slug(method).replace('=-', '')}"
        return partial(
            trained, results, name, TASK, METHODS[method], seed, ("--optimizer", optimizer, "--lr", f"{lr:g}")
        )

    methods = [DENSE, *(method for pair in pairs.items() for method in pair)]
    return run_seeds([(*rate, method) for rate in RATES for method in methods], seeds, make)


def judge(found: Runs, pairs: Mapping[str, str]) -> list[Claim]:
    """Compare the losses of accuracy in each cell, and over all cells."""
    seeds = len(found[(*RATES[0], DENSE)])
    differs = (
        f"{DATASET}, a perceptron of one hidden layer, {RANKS} ranks, {RANKS_PER_NODE} a node, cosine decay, "
        f"{seeds} seeds, points above dense at the same rate; one image is 0.28 points; means are judged"
    )
    claims = []
    for flat, nodes in pairs.items():
        pooled: dict[str, list[float]] = {flat: [], nodes: []}
        for rate in RATES:
            points = {method: lost(found, *rate, method) for method in (flat, nodes)}
            for method, values in pooled.items():
                values += points[method]
            what = f"{rate[0]} {rate[1]:g}: {nodes} loses at most half as much as Marsit among all ranks"
            claims.append(_cell(what, points[flat], points[nodes], differs))
        claims.append(
            _cell(
                f"all rates: {nodes} loses at most half as much",
                pooled[flat],
                pooled[nodes],
                "the same runs, all rates together",
            )
        )
    return claims


def _cell(what: str, flat: Sequence[float], nodes: Sequence[float], differs: str) -> Claim:
    """Judge one cell; there is nothing to halve where Marsit loses nothing."""
    loses = float(np.mean(flat)) < 0
    here = f"{np.mean(nodes):+.2f}, Marsit among all ranks {np.mean(flat):+.2f}; difference {paired(nodes, flat)}"
    holds = float(np.mean(nodes)) >= float(np.mean(flat)) / 2 if loses else None
    return Claim("–", what, "–", here, holds, differs)


PARTS = (accuracy,)
