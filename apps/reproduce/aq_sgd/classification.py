"""Figure 3a, b: a pretrained encoder is fine-tuned to classify sequences."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from apps.finetune import examples
from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.aq_sgd.encoder import TOKENS, Options, run_on_threads
from apps.reproduce.aq_sgd.runs import MOST, how_many
from apps.reproduce.claims import Claim, paired
from apps.studies.parallel import Run, run_parallel
from apps.studies.results import Results, slug

BITS = ((2, 4),)
SMOOTHED = 5  # steps
USUAL, SHORT = Options(), Options(per_label=8, tested_per_label=15, epochs=3)
"""Training of a run, and of a quick one."""


def figure_3_classification(
    results: Results, seeds: int, full: bool, quick: bool = False
) -> tuple[list[Claim], list[Path]]:
    """Fine-tune in float32, by DirectQ and by AQ-SGD, and compare the losses and accuracies on texts held out."""
    many, common = how_many(seeds, full, quick), SHORT if quick else USUAL
    runs = {"fp32": common}
    for bits in BITS:
        runs[f"DirectQ {_suffix(bits)}"] = replace(common, bits=bits, direct=True)
        runs[f"AQ-SGD {_suffix(bits)}"] = replace(common, bits=bits)
    try:
        found = _trained(results, runs, many)
    except ValueError as error:  # names the package that is missing, and the cure
        return [Claim("Fig. 3a, b", "sequence classification", "curves", "not run", None, str(error))], []
    losses, accuracy = (
        {name: [record[key] for record in records] for name, records in found.items()}
        for key in ("test_loss", "accuracy")
    )
    differs = (
        f"all-MiniLM-L6-v2 in {common.stages} stages, {len(examples.LABELS)} labels with {common.per_label} texts of "
        f"{TOKENS} tokens each, {common.epochs} epochs, {many} seeds, tested on "
        f"{common.tested_per_label * len(examples.LABELS)} texts; there DeBERTa-1.5B on QNLI and CoLA"
    )
    claims = []
    for bits in BITS:
        ours, direct = (f"{method} {_suffix(bits)}" for method in ("AQ-SGD", "DirectQ"))
        lost = paired(losses[ours], losses["fp32"])
        claims += [
            Claim(
                "Fig. 3a, b",
                f"classification: {ours} converges almost as float32",
                "curves lie on each other",
                f"test loss {np.mean(losses[ours]):.4f} against {np.mean(losses['fp32']):.4f} nats: {lost}; accuracy "
                f"{np.mean(accuracy[ours]):.1%} against {np.mean(accuracy['fp32']):.1%}",
                lost.most <= MOST[bits],
                f"{differs}; judged: surely at most {MOST[bits]} nats above",
            ),
            Claim(
                "Fig. 3a, b",
                f"classification: {direct} ends worse than AQ-SGD",
                "much worse, or diverges",
                f"test loss {np.mean(losses[direct]):.4f} nats, DirectQ less AQ-SGD "
                f"{paired(losses[direct], losses[ours])}; accuracy {np.mean(accuracy[direct]):.1%}",
                paired(losses[direct], losses[ours]).above,
                differs,
            ),
        ]
    lines = [Curve(name, *_smoothed([record["losses"] for record in records])) for name, records in found.items()]
    return claims, [curves(results.folder / "classification.png", lines, "step", "training loss, nats")]


def _suffix(bits: tuple[int, int]) -> str:
    return f"fw{bits[0]} bw{bits[1]}"


def _trained(results: Results, runs: dict[str, Options], seeds: int) -> dict[str, list[Record]]:
    made: dict[tuple[str, int], Record] = {}
    missing: dict[tuple[str, int], Run] = {}
    for seed in range(seeds):
        for name, options in runs.items():
            file, own = slug(f"classification, {name}-{seed}"), asdict(replace(options, seed=seed))
            known = results.kept(file, own)
            if known is None:
                missing[name, seed] = partial(results.get, file, own, partial(run_on_threads, own))
            else:
                made[name, seed] = known
    made |= run_parallel(missing)
    return {name: [made[name, seed] for seed in range(seeds)] for name in runs}


def _smoothed(runs: list[list[float]]) -> tuple[range, list[list[float]]]:
    """Steps, and means of `SMOOTHED` losses that follow each other."""
    means = [np.convolve(run, np.ones(SMOOTHED) / SMOOTHED, "valid").tolist() for run in runs]
    return range(SMOOTHED, SMOOTHED + len(means[0])), means
