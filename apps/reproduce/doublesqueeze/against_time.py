"""Losses of DoubleSqueeze and its rivals against time: losses against epochs, at the times of steps over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from apps.plotting import Curve, panels
from apps.reproduce.claims import Claim, paired, time_to_goal
from apps.reproduce.doublesqueeze.learning import MARGIN, Runs, steps_per_epoch
from apps.reproduce.doublesqueeze.methods import DENSE, GROUPS, RIVALS, TOPOLOGIES
from apps.reproduce.doublesqueeze.times import MODEL, RATES, Times, seconds
from apps.reproduce.networks import last, per_epoch
from apps.studies.results import slug

SHOWN = ("100mbit", "1gbit", "none")
JUDGED = "100mbit"


def epoch_seconds(taken: Times, step_s: float, rate: str, n: int, topology: str, name: str) -> float:
    """Time of an epoch; the time of computing, that of the trained model, counts only for vectors of its length."""
    return steps_per_epoch() * ((step_s if n == MODEL else 0.0) + seconds(taken, rate, n, topology, name))


def seconds_to(goal: float, losses: Sequence[float], epoch_s: float) -> float | None:
    """Training time until the loss is reached, on straight lines between the ends of epochs; None if it never is."""
    for i, loss in enumerate(losses):
        if loss <= goal:
            before = losses[i - 1] if i else None
            part = 1.0 if before is None else (before - goal) / (before - loss)
            return (i + part) * epoch_s
    return None


def judge(runs: Runs, taken: Times, step_s: float, lengths: Sequence[int]) -> list[Claim]:
    """Check whether DoubleSqueeze reaches the loss of dense SGD, within the margin, sooner than each rival."""
    goal = (1 + MARGIN) * float(np.mean(last(runs[DENSE], "loss")))
    claims = []
    for n in lengths:
        what = "computing and synchronizing" if n == MODEL else "synchronizations of that length, without computing"
        for topology, called in TOPOLOGIES.items():
            for (group, names), (ours, rivals) in zip(GROUPS.items(), RIVALS.items(), strict=True):
                spent = {
                    name: _time_spent(runs, goal, name, epoch_seconds(taken, step_s, JUDGED, n, topology, name))
                    for name in names
                }
                gaps = {other: paired(spent[ours][0], spent[other][0]) for other in rivals}
                texts = [f"{name} {time_to_goal(of_seeds, missed)}" for name, (of_seeds, missed) in spent.items()]
                differences = ", ".join(
                    f"from {f'the end of {other}' if spent[other][1] else other} {gap}" for other, gap in gaps.items()
                )
                claims.append(
                    Claim(
                        f"experiments, {group}, against time",
                        f"{ours} reaches the loss first at {RATES[JUDGED]} ({called}, {n / 1e6:.2g} M elements)",
                        "curve leftmost",
                        f"{', '.join(texts)}; difference {differences}",
                        all(gap.below for gap in gaps.values()) and not spent[ours][1],
                        f"curves against epochs, at the times of steps over MPI on emulated hosts: {what}; loss "
                        f"{goal:.3f}, dense's plus {MARGIN:.0%}; a rival that does not reach it is compared by the end "
                        "of its run",
                    )
                )
    return claims


def _time_spent(runs: Runs, goal: float, name: str, epoch_s: float) -> tuple[list[float], int]:
    """Seconds of each seed until the goal or the end, and how many seeds did not reach the goal."""
    reached = [(seconds_to(goal, losses, epoch_s), len(losses) * epoch_s) for losses in per_epoch(runs[name], "loss")]
    return [whole if at is None else at for at, whole in reached], sum(at is None for at, _ in reached)


def draw(runs: Runs, taken: Times, step_s: float, lengths: Sequence[int], folder: Path) -> list[Path]:
    """Draw losses against time, a figure for each group and topology, a row for each length, a column for each rate."""

    def curve(name: str, epoch_s: float) -> Curve:
        ends = per_epoch(runs[name], "epoch", epoch_s)[0]
        return Curve(name, ends, per_epoch(runs[name], "loss"))

    drawn = []
    for group, names in GROUPS.items():
        for topology, called in TOPOLOGIES.items():
            grid = [
                [
                    (
                        f"{n / 1e6:.2g} M elements, {RATES[rate]}",
                        [curve(name, epoch_seconds(taken, step_s, rate, n, topology, name)) for name in names],
                    )
                    for rate in SHOWN
                ]
                for n in lengths
            ]
            path = folder / f"{slug(group)}-loss-time-{slug(called)}.png"
            drawn.append(panels(path, grid, f"seconds ({called})", "training loss"))
    return drawn
