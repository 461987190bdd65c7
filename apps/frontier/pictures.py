"""Figures of the record: final scores against the time of the whole training at each rate, and against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from apps.figure_style import Look, looks_of
from apps.frontier import verdict
from apps.frontier.cases import DENSE
from apps.frontier.tasks import TASKS, Task
from apps.frontier.times import RATES, step_seconds
from apps.frontier.verdict import Learned
from apps.plotting import headline, legend, new_figure, plain_numbers, save
from apps.records import Record

SHOWN = {
    "gpt": (DENSE, "Relay(16)", "Relay(4)", "Relay(2, copy)", "Marsit", "SparseLoCo", "PowerSGD", "1-bit Adam"),
    "sorted": (DENSE, "Relay(16)", "Relay(4)", "Marsit", "DoubleSqueeze(4 levels)", "SparseLoCo"),
}
"""Methods of the figure of a task, as far as they have been trained."""
TITLES = {
    "gpt": "One bit of every step, or two bits after 10, end where exact means do, sooner up to 1 Gbit/s",
    "sorted": "Images sorted by label: two bits bear it, one bit does not",
}
LOWEST = {"gpt": None, "sorted": 70.0}
"""Score at which the axis begins."""


def draw(record: Record, times: Mapping[str, Record], task: Task, seeds: Sequence[int], path: Path) -> Path:
    """Draw a task's methods, each as a line from every step to every 100; returns the path."""
    every = verdict.learned(record, task, seeds)
    found = [one for one in every if one.method in SHOWN[task.name] and one.ranks == verdict.RANKS]
    found = [one for one in found if not _is_second(one, found, task)]
    methods = [name for name in SHOWN[task.name] if any(one.method == name for one in found)]
    looks = looks_of(methods)
    figure, axes = new_figure(2, 2, height=6.2)
    what = f"{task.title[0].upper()}{task.title[1:]}: {task.steps} steps on {verdict.RANKS} ranks"
    meaning = "A line's points are means of every step (gradients or updates: the better), and of every 10, 30 and 100."
    headline(figure, TITLES[task.name], f"{what}, means and ranges of {len(seeds)} seeds. {meaning}")
    for part, (rate, title) in zip(axes.flat, [*RATES.items(), (None, "bytes")], strict=True):
        taken = None if rate is None else step_seconds(times[rate])
        for name in methods:
            points = [(_place(one, task, taken), one) for one in found if one.method == name]
            _line(part, name, looks[name], [(x, one) for x, one in points if x is not None], len(seeds))
        if rate is None:
            part.set(xscale="log", title=title, xlabel="MB sent by a rank")
            plain_numbers(part.xaxis)
        else:
            part.set(title=f"links of {title}", xlabel="seconds of the training")
            part.set_xlim(0, 1.05 * part.dataLim.x1)
        part.set_ylim(bottom=LOWEST[task.name])
    figure.supylabel(task.score, fontsize=10)
    legend(axes[0], axes[0][0].get_legend_handles_labels()[0], columns=4)
    return save(figure, path)


def _is_second(one: Learned, every: Sequence[Learned], task: Task) -> bool:
    """Return True for means of every step's gradients or updates where the method's other ones ended better."""
    others = [two.final for two in every if two.method == one.method and {one.local_steps, two.local_steps} == {0, 1}]
    return any(final < one.final if task.lower_is_better else final > one.final for final in others)


def _place(one: Learned, task: Task, times: Mapping[str, tuple[float, float]] | None) -> float | None:
    """Return megabytes or, with the times of a rate, seconds; None for methods that were not timed."""
    return one.sent / 1e6 if times is None else verdict.seconds(one, task, task.steps, times)


def _line(axes: Axes, name: str, look: Look, points: Sequence[tuple[float, Learned]], seeds: int) -> None:
    points = sorted(points, key=lambda point: point[1].local_steps)
    x = [place for place, _ in points]
    # a method that was not timed has its place in the legend all the same
    last = np.array([[scores[-1] for scores in one.scores] for _, one in points]).reshape(len(points), seeds)
    mean = last.mean(axis=1)
    axes.errorbar(
        x, mean, (mean - last.min(axis=1), last.max(axis=1) - mean), label=name, color=look.color, marker=look.marker,
        linestyle=look.linestyle, markersize=5, linewidth=1.2, elinewidth=0.8,
    )  # fmt: skip


def draw_all(learned: Record, times: Mapping[str, Mapping[str, Record]], folder: Path) -> list[Path]:
    """Draw the figures of all tasks that have one; returns their paths."""
    return [draw(learned, times[name], TASKS[name], range(3), folder / f"frontier-{name}.png") for name in SHOWN]
