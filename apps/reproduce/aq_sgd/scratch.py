"""Figure 7: training from random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from apps.plotting import Curve, panels
from apps.reproduce.aq_sgd.runs import FP32, MOST, by_epoch, gap, how_many, losses, shrink, trained
from apps.reproduce.claims import Claim
from apps.reproduce.results import Results

SCRATCH = replace(FP32, epochs=20, characters=25_000, skip=0, lr=1e-3)
BITS, BITS_FULL = ((2, 4),), ((2, 4), (4, 8))
"""The fewest that the paper uses, and the most too: it does not state those of this figure."""


def figure_7(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Train from random weights in float32, by DirectQ and by AQ-SGD."""
    many, every = how_many(seeds, full, quick), BITS_FULL if full else BITS
    runs = {"fp32": replace(SCRATCH, stages=1)}  # of as many stages it ends with the same bits
    for forward, backward in every:
        few = replace(SCRATCH, forward_bits=forward, backward_bits=backward)
        runs |= {
            f"DirectQ fw{forward} bw{backward}": replace(few, direct=True),
            f"AQ-SGD fw{forward} bw{backward}": few,
        }
    found = trained(results, runs, many, quick, None, "from scratch, ")
    shown = shrink(SCRATCH, quick)
    differs = (
        f"the same model with random weights, {shown.characters // 1000} thousand characters, {shown.epochs} epochs of "
        f"which a tenth warms up, learning rate {shown.lr:g}, {many} seeds; there GPT2-1.5B on WikiText and arXiv"
    )
    claims = []
    for bits in every:
        suffix, most = f"fw{bits[0]} bw{bits[1]}", MOST[bits]
        ours, direct = found[f"AQ-SGD {suffix}"], found[f"DirectQ {suffix}"]
        claims += [
            Claim(
                "Fig. 7",
                f"from scratch, AQ-SGD {suffix} converges almost as fast as float32",
                "curves lie on each other",
                f"{np.mean(losses(ours)):.4f} against {np.mean(losses(found['fp32'])):.4f} nats: "
                f"{gap(ours, found['fp32'])}",
                gap(ours, found["fp32"]).most <= most,
                f"{differs}; judged: surely at most {most} nats above",
            ),
            Claim(
                "Fig. 7",
                f"from scratch, DirectQ {suffix} ends clearly above float32",
                "a clear gap late in training",
                f"{np.mean(losses(direct)):.4f} nats: {gap(direct, found['fp32'])}; above AQ-SGD {gap(direct, ours)}",
                gap(direct, found["fp32"]).above,
                differs,
            ),
        ]
    epochs = range(1, shown.epochs + 1)
    lines = [
        (
            f"fw{forward} bw{backward}",
            [Curve(name.split(" ")[0], epochs, by_epoch(found[name]))
             for name in ("fp32", f"DirectQ fw{forward} bw{backward}", f"AQ-SGD fw{forward} bw{backward}")],
        )
        for forward, backward in every
    ]  # fmt: skip
    return claims, [panels(results.folder / "from-scratch.png", [lines], "epoch", "validation loss, nats a character")]
