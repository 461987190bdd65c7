"""Figures 3 and 1b: losses of float32, DirectQ and AQ-SGD, and how much activations change between visits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves, panels
from apps.records import Record
from apps.reproduce.aq_sgd.runs import BITS, FP32, SAME, gap, how_many, losses, mean_gap, trained
from apps.reproduce.claims import Claim, paired
from apps.reproduce.results import Results

MOST = {(4, 8): 0.02, (2, 4): 0.06}
"""Nats above float32."""
TIMES_WORSE = 3.0
SMOOTHED = 20  # steps


def methods(results: Results, seeds: int) -> dict[str, list[Record]]:
    """The runs of float32, whose activations are watched, and of DirectQ and AQ-SGD."""
    runs = {"fp32": replace(FP32, magnitudes=True)}
    for name, direct in (("DirectQ", True), ("AQ-SGD", False)):
        for forward, backward in BITS:
            options = replace(FP32, forward_bits=forward, backward_bits=backward, direct=direct)
            runs[f"{name} fw{forward} bw{backward}"] = options
    return trained(results, runs, seeds)


def figure_3(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train with each method and compare the last validation losses."""
    many = how_many(seeds, full)
    found = methods(results, many)
    differs = f"{SAME}, {many} seeds, 4 stages, evaluated without compression"
    claims = [
        Claim(
            "Fig. 3",
            f"AQ-SGD fw{forward} bw{backward} converges almost as float32",
            "curves lie on each other",
            f"{np.mean(losses(found[name])):.4f} against {np.mean(losses(found['fp32'])):.4f} nats: "
            f"{gap(found[name], found['fp32'])}",
            None if most is None else mean_gap(found[name], found["fp32"]) <= most,
            differs + ("" if most is None else f"; judged: at most {most} nats above"),
        )
        for forward, backward in BITS
        for name, most in ((f"AQ-SGD fw{forward} bw{backward}", MOST.get((forward, backward))),)
    ]
    return claims + [_direct_is_worse(found, bits, differs) for bits in BITS], [_draw(results, found)]


def _direct_is_worse(found: Mapping[str, list[Record]], bits: tuple[int, int], differs: str) -> Claim:
    suffix = f"fw{bits[0]} bw{bits[1]}"
    direct, ours = found[f"DirectQ {suffix}"], found[f"AQ-SGD {suffix}"]
    theirs, own = mean_gap(direct, found["fp32"]), mean_gap(ours, found["fp32"])
    difference = paired(losses(direct), losses(ours))
    spread = np.std(np.subtract(losses(direct), losses(ours)), ddof=1) / np.sqrt(len(direct))
    judged = bits == (2, 4)
    return Claim(
        "Fig. 3",
        f"DirectQ {suffix} ends significantly worse than AQ-SGD",
        "much worse, or diverges",
        f"{theirs:+.4f} nats above float32 against {own:+.4f}; DirectQ - AQ-SGD {difference}, "
        f"standard error {spread:.4f}",
        bool(theirs >= TIMES_WORSE * own and difference.mean > 2 * spread) if judged else None,
        f"{differs}; judged: {TIMES_WORSE:g} times as far above, and by two standard errors" if judged else differs,
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


def figure_1b(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Watch activations at the first cut, and their changes, while float32 trains."""
    many = how_many(seeds, full)
    records = methods(results, many)["fp32"]
    sizes, changes = (np.array([record[key] for record in records]) for key in ("activations", "changes"))
    tenth = sizes.shape[1] // 10
    first = np.nanmean(changes[:, tenth : 2 * tenth]) / np.mean(sizes[:, tenth : 2 * tenth])
    last = np.mean(changes[:, -tenth:]) / np.mean(sizes[:, -tenth:])
    steps = list(range(sizes.shape[1]))
    lines = [
        Curve("|activation|", steps, sizes.tolist()),
        Curve("|change since the last visit|", steps, changes.tolist()),
    ]
    picture = curves(results.folder / "magnitudes.png", lines, "step", "mean size of an element", log=True)
    return [
        Claim(
            "Fig. 1b",
            "activations change by less and less from visit to visit, while they themselves grow or stay",
            "changes fall far below activations",
            f"change over activation {first:.3f} in the second tenth of the steps, {last:.3f} in the last; activations "
            f"{np.mean(sizes[:, :tenth]):.3f} and {np.mean(sizes[:, -tenth:]):.3f}",
            bool(last < first),
            f"{SAME}, {many} seeds, first cut",
        )
    ], [picture]
