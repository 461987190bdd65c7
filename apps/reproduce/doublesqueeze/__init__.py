"""DoubleSqueeze (Tang et al., ICML 2019): loss against epochs and against time, and the gain against bandwidth.

- `learning`: losses against epochs, trained by ranks that are threads
- `times`: bytes and times over MPI (`doublesqueeze_job` runs on the ranks)
- here: both together, losses against time
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.plotting import Curve, panels
from apps.reproduce.claims import Claim, paired
from apps.reproduce.doublesqueeze import learning, times
from apps.reproduce.doublesqueeze.learning import MARGIN, Runs, final, slug, steps_per_epoch
from apps.reproduce.doublesqueeze.methods import DENSE, DS_1BIT, DS_TOPK, FORMS, GROUPS
from apps.reproduce.doublesqueeze.times import LARGEST, MODEL, RATES, RESNET_18, RIVALS, Times, seconds
from apps.reproduce.results import Book

SHOWN = ("100mbit", "1gbit", "none")
JUDGED = "100mbit"
OURS = {"1-bit": DS_1BIT, "top-k": DS_TOPK}


def run(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """All parts; returns the claims and the figures."""
    found, rates = learning.learn(book, seeds, full)
    claims = [*learning.claims_of(found, rates, full), *times.forms(book)]
    figures = learning.draw(found, book.folder)
    computing, taken = times.step_seconds(book), times.measured(book, full)
    if not isinstance(taken, str):
        lengths = (MODEL, LARGEST if full else RESNET_18)
        claims += against_time(found, taken, computing, lengths)
        figures += draw(found, taken, computing, lengths, book.folder)
    claims += times.claims_of(taken, full)
    figures += times.draw(taken, book.folder, full)
    return claims, figures


def step_s(taken: Times, computing: float, rate: str, n: int, form: str, name: str) -> float:
    """Of training: computing is the trained model's, and left out where a synchronization is of another length."""
    return (computing if n == MODEL else 0.0) + seconds(taken, rate, n, form, name)


def seconds_to(goal: float, losses: Sequence[float], epoch_s: float) -> float | None:
    """Training seconds until the loss is reached, on straight lines between the ends of epochs; None: never."""
    for i, loss in enumerate(losses):
        if loss <= goal:
            before = losses[i - 1] if i else None
            part = 1.0 if before is None else (before - goal) / (before - loss)
            return (i + part) * epoch_s
    return None


def against_time(found: Runs, taken: Times, computing: float, lengths: Sequence[int]) -> list[Claim]:
    """Seconds until dense SGD's loss, within the margin, of DoubleSqueeze against each rival."""
    goal = (1 + MARGIN) * float(np.mean(final(found[DENSE], "loss")))
    made = []
    for n in lengths:
        what = "computing and synchronizing" if n == MODEL else "synchronizations of that length, computing left out"
        for form, called in FORMS.items():
            for group, ours in OURS.items():
                spent = {
                    name: _spent(found, goal, name, steps_per_epoch() * step_s(taken, computing, JUDGED, n, form, name))
                    for name in GROUPS[group]
                }
                gaps = {other: paired(spent[ours][0], spent[other][0]) for other in RIVALS[ours]}
                texts = [f"{name} {np.mean(runs):.3g} s{_missed(missed)}" for name, (runs, missed) in spent.items()]
                differences = ", ".join(f"from {other} {gap}" for other, gap in gaps.items())
                made.append(
                    Claim(
                        f"experiments, {group}, against time",
                        f"{ours} reaches the loss first at {RATES[JUDGED]} ({called}, {n / 1e6:.2g} M elements)",
                        "curve leftmost",
                        f"{', '.join(texts)}; difference {differences}",
                        all(gap.below for gap in gaps.values()) and not spent[ours][1],
                        f"times of a step over MPI on emulated hosts put to the curves against epochs: {what}; loss "
                        f"{goal:.3f}, dense's plus {MARGIN:.0%}; who does not get there counts with the whole run",
                    )
                )
    return made


def _spent(found: Runs, goal: float, name: str, epoch_s: float) -> tuple[list[float], int]:
    """Seconds of each seed, and how many did not reach the goal."""
    reached = [seconds_to(goal, [epoch["loss"] for epoch in record["epochs"]], epoch_s) for record in found[name]]
    whole = [len(record["epochs"]) * epoch_s for record in found[name]]
    return [end if at is None else at for at, end in zip(reached, whole, strict=True)], reached.count(None)


def _missed(missed: int) -> str:
    return f" (not reached by {missed} seeds)" if missed else ""


def draw(found: Runs, taken: Times, computing: float, lengths: Sequence[int], folder: Path) -> list[Path]:
    """Losses against time, a figure for each group and form, a row for each length, a column for each rate."""
    drawn = []
    for group, names in GROUPS.items():
        for form, called in FORMS.items():
            grid = [
                [
                    (
                        f"{n / 1e6:.2g} M elements, {RATES[rate]}",
                        [_curve(found, name, step_s(taken, computing, rate, n, form, name)) for name in names],
                    )
                    for rate in SHOWN
                ]
                for n in lengths
            ]
            path = folder / f"{slug(group)}-loss-time-{called.replace(' ', '-')}.png"
            drawn.append(panels(path, grid, f"seconds ({called})", "training loss"))
    return drawn


def _curve(found: Runs, name: str, of_a_step: float) -> Curve:
    records = found[name]
    ends = [epoch["epoch"] * steps_per_epoch() * of_a_step for epoch in records[0]["epochs"]]
    return Curve(name, ends, [[epoch["loss"] for epoch in record["epochs"]] for record in records])
