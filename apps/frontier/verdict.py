"""Verdict: seconds to the scores that dense averaging reaches, at each rate, from the records of learning and of times.

A method's seconds are its steps, each as long as the median of the emulated hosts: most have one synchronization in H,
and 1-bit and 0/1 Adam a warm-up. The goals are the final scores of dense averages of every step and of every 10 and 30
steps. The baseline is the dense average of the H that is fastest there, with the step of the fastest dense loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apps.frontier.cases import DENSE, GRADIENTS, OUTER, Exchange, exchanges, own_optimizers
from apps.frontier.tasks import TASKS, Task
from apps.frontier.times import OUR_DENSE, RATES, step_seconds
from apps.records import Record

GOALS = (GRADIENTS, 10, 30)
"""Local steps of the dense averages whose final scores are goals."""
TOLERANCE = {"nats a character": 0.01, "% of test images": 0.2}
"""By how much a mean score may miss a goal and count as equal."""
PLAIN = (DENSE, "float16")
RANKS = 4


@dataclass(frozen=True)
class Learned:
    """Scores of a method by seed and evaluation, and the bytes that a rank sent."""

    method: str
    local_steps: int
    ranks: int
    scores: Sequence[Sequence[float]]
    sent: float

    @property
    def title(self) -> str:
        """Method, H, and ranks where these are not those of the other methods."""
        steps = "" if self.local_steps == GRADIENTS else f", H = {self.local_steps}"
        return self.method + steps + ("" if self.ranks == RANKS else f", {self.ranks} ranks")

    @property
    def final(self) -> float:
        """Mean score of the seeds at the end."""
        return float(np.mean([one[-1] for one in self.scores]))


def learned(record: Record, task: Task, seeds: Sequence[int]) -> list[Learned]:
    """Return the methods of a task that were trained on all `seeds`."""
    by_case: dict[tuple[str, int, int], dict[int, Record]] = {}
    for one in record["runs"]:
        settings = one["settings"]
        if settings["task"] == task.name and settings["steps"] == task.steps:
            case = settings["method"], settings["local_steps"], settings["ranks"]
            found = by_case.setdefault(case, {})
            if settings["seed"] in found:
                raise ValueError(f"the record has two runs of {case} with seed {settings['seed']}: remove the old one")
            found[settings["seed"]] = one["result"]
    return [
        # seeds send as much, but for one that ends in NaN, whose bytes are not known
        Learned(*case, [found[seed]["scores"] for seed in seeds], max(found[seed]["bytes"] for seed in seeds))
        for case, found in by_case.items()
        if all(seed in found for seed in seeds)
    ]


def steps_to(one: Learned, task: Task, goal: float) -> float | None:
    """Return the steps after which the mean score reaches a goal, linear between evaluations; None: it does not."""
    mean = np.mean(np.asarray(one.scores), axis=0)
    sign = 1 if task.lower_is_better else -1
    missing = sign * (mean - goal) - TOLERANCE[task.score]
    reached = np.flatnonzero(missing <= 0)
    if not reached.size:
        return None
    at = int(reached[0])
    part = 1.0 if at == 0 else missing[at - 1] / (missing[at - 1] - missing[at])
    return task.evaluated * (at + float(part))


def seconds(one: Learned, task: Task, steps: float, times: Mapping[str, tuple[float, float]]) -> float | None:
    """Return the time of the first `steps` of a training; None: the method was not timed."""
    timed = one.method.removesuffix(OUTER)  # an outer optimizer takes next to no time
    if timed not in times:
        return None
    local, synchronized = times[timed]
    lengths = {Exchange.NOTHING: local, Exchange.OWN: synchronized, Exchange.EXACT: times[OUR_DENSE][1]}
    each = [lengths[kind] for kind in exchanges(one.method, one.local_steps, task.steps, task.evaluated)]
    if one.method not in own_optimizers(task.name):  # synchronizations count evenly, wherever in H steps a goal is
        return steps * sum(each) / len(each)
    whole = int(steps)
    return sum(each[:whole]) + (steps - whole) * (each[whole] if whole < len(each) else 0.0)


def judge(record: Record, task: Task, seeds: Sequence[int], times: Mapping[str, Record]) -> Record:
    """Return scores, prices and bytes of each method, and for each rate and goal the seconds of all that reach it."""
    every = learned(record, task, seeds)
    means = {(one.local_steps, one.ranks): one for one in every if one.method == DENSE}
    rows = [_row(one, means.get((one.local_steps, one.ranks))) for one in every]
    found = [one for one in every if one.ranks == RANKS]
    exact = {one.local_steps: one for one in found if one.method == DENSE}
    ranking = []
    for rate, measured in times.items():
        by_method = step_seconds(measured)
        for steps in (one for one in GOALS if one in exact):
            goal = exact[steps].final
            reached = {}
            for one in found:
                needed = steps_to(one, task, goal)
                taken = None if needed is None else seconds(one, task, needed, by_method)
                if taken is not None:
                    reached[one.title] = taken
            ranking.append({"rate": rate, "goal_of": steps, "goal": goal, "seconds": reached})
    return {"task": task.name, "seeds": list(seeds), "rows": rows, "ranking": ranking}


def _row(one: Learned, base: Learned | None) -> Record:
    last = [scores[-1] for scores in one.scores]
    prices = None if base is None else np.subtract(last, [scores[-1] for scores in base.scores]).tolist()
    named = {"title": one.title, "method": one.method, "local_steps": one.local_steps, "ranks": one.ranks}
    return {**named, "final": last, "prices": prices, "bytes": one.sent}


def best(ranking: Record, plain: bool) -> tuple[str, float] | None:
    """Return the fastest of dense methods, or of the others, with its seconds."""
    times = {title: taken for title, taken in ranking["seconds"].items() if (title.partition(",")[0] in PLAIN) == plain}
    return min(times.items(), key=lambda item: item[1]) if times else None


def table(verdict: Record) -> str:
    """Return Markdown: final scores with bytes, then seconds to each goal."""
    task = TASKS[verdict["task"]]
    digits = 3 if task.lower_is_better else 2
    lines = [
        f"| {task.title} | {task.score} | against the exact mean of the same steps | MB a rank |",
        "|---|---:|---|---:|",
    ]
    rows = sorted(verdict["rows"], key=lambda row: (row["ranks"], row["local_steps"], -row["bytes"]))
    lines.extend(
        f"| {row['title']} | {np.mean(row['final']):.{digits}f} | {_spread(row, digits)} | {row['bytes'] / 1e6:.3g} |"
        for row in rows
    )
    lines += ["", "| goal | rate | best dense | best compressed | times as fast |", "|---|---|---|---|---:|"]
    for one in verdict["ranking"]:
        dense, ours = best(one, True), best(one, False)
        goal = "every step" if one["goal_of"] == GRADIENTS else f"every {one['goal_of']} steps"
        cells = [f"{found[0]}: {found[1]:.1f} s" if found else "not reached" for found in (dense, ours)]
        factor = f"{dense[1] / ours[1]:.2f}" if dense and ours else ""
        lines.append(
            f"| dense, {goal}: {one['goal']:.{digits}f} | {RATES[one['rate']]} | {' | '.join(cells)} | {factor} |"
        )
    return "\n".join(lines) + "\n"


def _spread(row: Mapping[str, Any], digits: int) -> str:
    if not row["prices"] or row["method"] == DENSE:
        return ""
    each = np.asarray(row["prices"])
    return f"{each.mean():+.{digits}f} ({each.min():+.{digits}f} to {each.max():+.{digits}f})"
