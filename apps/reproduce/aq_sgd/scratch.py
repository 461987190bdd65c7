"""Figure 7: training from random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from apps.pipeline.options import Options
from apps.plotting import Curve, panels
from apps.records import Record
from apps.reproduce.aq_sgd.runs import FP32, MOST, by_epoch, gap, how_many, losses, shrink, trained
from apps.reproduce.claims import Claim, paired
from apps.studies.results import Results

BITS, BITS_FULL = ((2, 4),), ((2, 4), (4, 8))
"""The fewest that the paper uses, and the most too: it does not state those of this figure."""


@dataclass(frozen=True)
class Setting:
    """Training in float32, and the beginning of the names of its files."""

    options: Options
    prefix: str

    @property
    def name(self) -> str:
        """Number of epochs and learning rate."""
        return f"{self.options.epochs} epochs at {self.options.lr:g}"


SLOW = Setting(replace(FP32, epochs=20, characters=25_000, skip=0, lr=1e-3), "from scratch, ")
"""As many epochs as in the paper, at a learning rate at which float32 does not get worse on held-out text."""
FAST = Setting(replace(SLOW.options, epochs=10, lr=3e-3), "from scratch at 0.003, ")


def figure_7(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Train from random weights in float32, by DirectQ and by AQ-SGD."""
    many, every = how_many(seeds, full, quick), BITS_FULL if full else BITS
    claims: list[Claim] = []
    grid: list[tuple[str, Sequence[Curve]]] = []
    for setting in (SLOW, FAST):
        runs = {"fp32": replace(setting.options, stages=1)}  # of as many stages it ends with the same bits
        for forward, backward in every:
            few = replace(setting.options, forward_bits=forward, backward_bits=backward)
            runs[f"DirectQ fw{forward} bw{backward}"] = replace(few, direct=True)
            runs[f"AQ-SGD fw{forward} bw{backward}"] = few
        found = trained(results, runs, many, quick, None, setting.prefix)
        shown = shrink(setting.options, quick)
        differs = (
            f"that model with random weights, {shown.characters // 1000} thousand characters, {shown.epochs} epochs, "
            f"a tenth of them to warm up, learning rate {shown.lr:g}, {many} seeds; there GPT2-1.5B, WikiText and arXiv"
        )
        for bits in every:
            claims += _judge(found, bits, setting, differs)
        epochs = range(1, shown.epochs + 1)
        grid.append((setting.name, [Curve(name, epochs, by_epoch(records)) for name, records in found.items()]))
    path = results.folder / "from-scratch.png"
    return claims, [panels(path, [grid], "epoch", "validation loss, nats a character", legends=True)]


def _judge(
    found: Mapping[str, list[Record]], bits: tuple[int, int], setting: Setting, differs: str
) -> tuple[Claim, Claim]:
    suffix, most = f"fw{bits[0]} bw{bits[1]}", MOST[bits]
    ours, direct, full_precision = found[f"AQ-SGD {suffix}"], found[f"DirectQ {suffix}"], found["fp32"]
    training = {name: [record["epochs"][-1]["loss"] for record in records] for name, records in found.items()}
    return (
        Claim(
            "Fig. 7",
            f"from scratch, {setting.name}, AQ-SGD {suffix} converges almost as fast as float32",
            "curves lie on each other",
            f"{np.mean(losses(ours)):.4f} against {np.mean(losses(full_precision)):.4f} nats: "
            f"{gap(ours, full_precision)}; in training {paired(training[f'AQ-SGD {suffix}'], training['fp32'])}",
            gap(ours, full_precision).most <= most,
            f"{differs}; judged: surely at most {most} nats above on held-out text",
        ),
        Claim(
            "Fig. 7",
            f"from scratch, {setting.name}, DirectQ {suffix} ends clearly above float32",
            "a clear gap late in training",
            f"{np.mean(losses(direct)):.4f} nats: {gap(direct, full_precision)}; above AQ-SGD {gap(direct, ours)}",
            gap(direct, full_precision).above,
            differs,
        ),
    )
