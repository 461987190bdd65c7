"""Figure 10: split learning, in which clients with skewed labels keep the first layers and the last ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from apps.mpi_jobs import call_on_ranks
from apps.pipeline.split.job import run
from apps.pipeline.split.options import METHODS, Options
from apps.plotting import Curve, curves
from apps.reproduce.aq_sgd.runs import how_many
from apps.reproduce.claims import Claim, paired
from apps.studies.results import Results

RANKS, ROUNDS, ROUNDS_FULL, ROUNDS_QUICK = 2, 20, 40, 4
QUICK_EXAMPLES = 512
MARGIN = 0.02  # of accuracy


def figure_10(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Train 16 clients and a server in float32, by DirectQ and by AQ-SGD."""
    many, rounds = how_many(seeds, full, quick), ROUNDS_QUICK if quick else ROUNDS_FULL if full else ROUNDS
    examples = QUICK_EXAMPLES if quick else Options().examples
    found: dict[str, list[list[float]]] = {}
    for seed in range(many):
        common = Options(rounds=rounds, decay_every=rounds // 2, examples=examples, seed=seed)
        options = [replace(common, method=method) for method in METHODS]
        given = [asdict(each) for each in options]
        make = partial(call_on_ranks, run, {"runs": given}, RANKS)
        for each, record in zip(options, results.get(f"split-{seed}", {"runs": given}, make)["runs"], strict=True):
            found.setdefault(each.name, []).append([one["test_accuracy"] for one in record["rounds"]])
    full_precision, direct, ours = found.values()
    last = {name: [run[-1] for run in runs] for name, runs in found.items()}
    behind = paired([run[-1] for run in ours], [run[-1] for run in full_precision])
    ahead = paired([run[-1] for run in ours], [run[-1] for run in direct])
    shown = ", ".join(f"{np.mean(values):.3f} with {name}" for name, values in last.items())
    differs = (
        f"small CNN, {examples} images of Fashion-MNIST, 16 clients, {rounds} rounds, {many} seeds; there ResNet-34"
    )
    lines = [Curve(name, range(1, rounds + 1), runs) for name, runs in found.items()]
    return [
        Claim(
            "Fig. 10",
            "2 bits forward and 8 bits of a fifth backward keep float32's accuracy with AQ-SGD",
            "curves lie on each other",
            f"test accuracy {shown}; AQ-SGD less float32 {behind}",
            behind.least > -MARGIN,
            f"{differs}; judged: surely less than {MARGIN} behind",
        ),
        Claim("Fig. 10", "DirectQ is worse than AQ-SGD", "below", f"AQ-SGD less DirectQ {ahead}", ahead.above, differs),
    ], [curves(results.folder / "split-learning.png", lines, "round", "test accuracy")]
