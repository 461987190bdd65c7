"""Figures 3 and 1b: losses of float32, DirectQ and AQ-SGD, and how much activations change between visits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from apps.plotting import Curve, panels
from apps.records import Record
from apps.reproduce.aq_sgd.pictures import magnitudes, parts_that_change
from apps.reproduce.aq_sgd.runs import BITS, FP32, MOST, SAME, gap, how_many, losses, mean_gap, trained
from apps.reproduce.claims import Claim
from apps.studies.results import Results

TIMES_WORSE = 3.0
SETTLED = 0.1
"""Part of activations that changes from visit to visit at most, where the paper's curves are far apart."""
SMOOTHED = 20  # steps


def methods(results: Results, seeds: int, quick: bool) -> dict[str, list[Record]]:
    """The runs of float32, whose activations are watched, and of DirectQ and AQ-SGD."""
    runs = {"fp32": replace(FP32, magnitudes=True)}
    for name, direct in (("DirectQ", True), ("AQ-SGD", False)):
        for forward, backward in BITS:
            options = replace(FP32, forward_bits=forward, backward_bits=backward, direct=direct)
            runs[f"{name} fw{forward} bw{backward}"] = options
    return trained(results, runs, seeds, quick)


def figure_3(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Train with each method and compare the last validation losses."""
    many = how_many(seeds, full, quick)
    found = methods(results, many, quick)
    differs = f"{SAME}, {many} seeds, 4 stages, evaluated without compression"
    claims = [
        Claim(
            "Fig. 3",
            f"AQ-SGD fw{forward} bw{backward} converges almost as float32",
            "curves lie on each other",
            f"{np.mean(losses(found[name])):.4f} against {np.mean(losses(found['fp32'])):.4f} nats: "
            f"{gap(found[name], found['fp32'])}",
            gap(found[name], found["fp32"]).most <= most,
            f"{differs}; judged: surely at most {most} nats above",
        )
        for forward, backward in BITS
        for name, most in ((f"AQ-SGD fw{forward} bw{backward}", MOST[forward, backward]),)
    ]
    return claims + [_direct_is_worse(found, bits, differs) for bits in BITS], [_draw(results, found)]


def _direct_is_worse(found: Mapping[str, list[Record]], bits: tuple[int, int], differs: str) -> Claim:
    suffix = f"fw{bits[0]} bw{bits[1]}"
    direct, ours = found[f"DirectQ {suffix}"], found[f"AQ-SGD {suffix}"]
    theirs, own = mean_gap(direct, found["fp32"]), mean_gap(ours, found["fp32"])
    difference = gap(direct, ours)
    return Claim(
        "Fig. 3",
        f"DirectQ {suffix} ends significantly worse than AQ-SGD",
        "much worse, or diverges",
        f"{theirs:+.4f} nats above float32 against {own:+.4f}; DirectQ - AQ-SGD {difference}",
        bool(theirs >= TIMES_WORSE * own and difference.above),
        f"{differs}; judged: surely above, and {TIMES_WORSE:g} times as far above float32",
    )


def _draw(results: Results, found: Mapping[str, list[Record]]) -> Path:
    def curve(name: str) -> Curve:
        runs = [_smoothed(record["losses"]) for record in found[name]]
        return Curve(name.split(" ")[0], [SMOOTHED + step for step in range(len(runs[0]))], runs)

    rows = [
        [
            (
                f"fw{forward} bw{backward}",
                [curve(f"{kind}fw{forward} bw{backward}") for kind in ("DirectQ ", "AQ-SGD ")],
            )
            for forward, backward in BITS
        ]
    ]
    for _, lines in rows[0]:
        lines.insert(0, curve("fp32"))
    return panels(results.folder / "losses.png", rows, "step", "training loss, nats a character")


def _smoothed(values: list[float]) -> list[float]:
    """Means of `SMOOTHED` values that follow each other."""
    smooth: list[float] = np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, "valid").tolist()
    return smooth


def figure_1b(results: Results, seeds: int, full: bool, quick: bool = False) -> tuple[list[Claim], list[Path]]:
    """Watch activations at the first cut, and their changes, while float32 trains."""
    many = how_many(seeds, full, quick)
    records = methods(results, many, quick)["fp32"]
    sizes, changes = (np.array([record[key] for record in records]) for key in ("activations", "changes"))
    first, last = parts_that_change(sizes, changes)
    tenth = sizes.shape[1] // 10
    picture = magnitudes(
        {"activations": sizes.tolist(), "changes": changes.tolist()}, results.folder / "magnitudes.png"
    )
    return [
        Claim(
            "Fig. 1b",
            "activations change by less and less from visit to visit, and by far less than their size",
            "changes fall far below activations",
            f"change over activation {first:.3f} in a tenth of the steps from the second epoch on, {last:.3f} in the "
            f"last tenth; activations {np.mean(sizes[:, :tenth]):.3f} and {np.mean(sizes[:, -tenth:]):.3f}",
            bool(last < first and last <= SETTLED),
            f"{SAME}, {many} seeds, first cut; judged: the last is less, and at most {SETTLED:g}",
        )
    ], [picture]
