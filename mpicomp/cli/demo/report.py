"""Findings of the demo in words: a table, the gain with its conditions, and commands to try next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from collectives.cost.rate import EmulatedLink
from mpicomp.cli.demo.model import N_PARAMETERS
from mpicomp.cli.demo.text import N_TESTED
from mpicomp.cli.demo.training import BATCH, Point

LEAST_GAIN = 1.05  # smaller factors are within the noise of a machine's timing
HEADINGS = ("method", "steps", "accuracy", "MB sent by each rank", "seconds", "of these waiting")

SLOW_BYTES_S = 5e7  # of a link, below which there is much to gain


@dataclass(frozen=True)
class Comparison:
    """Trainings with the dense mean and with Marsit, which ended at dense's last accuracy or lower."""

    dense: list[Point]
    marsit: list[Point]
    ranks: int
    threads: bool  # the ranks are threads of one process, not those of MPI
    link: str | None  # the emulated link in words

    @property
    def factor(self) -> float:
        """Seconds of the dense training for each second of Marsit's."""
        return self.dense[-1].seconds / self.marsit[-1].seconds

    @property
    def bytes_factor(self) -> float:
        """Bytes that dense has sent for each byte of Marsit."""
        return self.dense[-1].bytes_sent / self.marsit[-1].bytes_sent

    @property
    def points_behind(self) -> float:
        """Points of accuracy by which Marsit ended below dense; 0 if it has reached dense's accuracy."""
        return max(0.0, 100 * (self.dense[-1].accuracy - self.marsit[-1].accuracy))

    @property
    def noise(self) -> float:
        """Half the width of the 95 % interval of an accuracy, in points, by the number of tested characters."""
        accuracy = self.dense[-1].accuracy
        return 100 * 1.96 * math.sqrt(accuracy * (1 - accuracy) / N_TESTED)

    @property
    def where(self) -> str:
        """The network in words."""
        if self.link:
            return f"over links of {self.link}"
        return "through shared memory" if self.threads else "over this network"

    @property
    def has_gain(self) -> bool:
        """Flag: Marsit is faster, and as accurate as far as the noise allows to see."""
        return self.points_behind <= self.noise and self.factor >= LEAST_GAIN

    def finding(self) -> str:
        """Return the result in one sentence, without its full stop."""
        if self.has_gain:
            return f"Marsit trains {self.factor:.1f} times as fast as dense to the same accuracy, {self.where}"
        if self.points_behind > self.noise:
            return f"Marsit ended {self.points_behind:.1f} points below the accuracy of dense, {self.where}"
        if self.factor * LEAST_GAIN > 1:
            return f"Marsit is as fast as dense, {self.where}"
        return f"Marsit takes {1 / self.factor:.1f} times as long as dense to the same accuracy, {self.where}"

    def conditions(self) -> str:
        """Return the conditions of both trainings on one line."""
        ranks = f"{self.ranks} {'threads of one process' if self.threads else 'ranks of MPI'}"
        links = f"emulated links of {self.link}" if self.link else "no emulated link"
        return f"{ranks}, {links}, a perceptron of {1e-6 * N_PARAMETERS:.2f} million parameters, batches of {BATCH}"

    @property
    def trainings(self) -> dict[str, list[Point]]:
        """Points of both trainings by name."""
        return {"dense": self.dense, "Marsit": self.marsit}

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table below `HEADINGS`."""
        rows = [_row(name, points[-1]) for name, points in self.trainings.items()]
        return [*rows, ("dense / Marsit", "", "", f"{self.bytes_factor:.1f}", f"{self.factor:.1f}", "")]

    def conclusion(self) -> list[str]:
        """Return the gain, the accuracies and the conditions, a line each."""
        reached = (
            f"{name} {100 * points[-1].accuracy:.1f} % after {points[-1].step} steps"
            for name, points in self.trainings.items()
        )
        return [
            f"{self.finding()}.",
            f"Accuracy: {', '.join(reached)}; each ± {self.noise:.1f}, from {N_TESTED:,} tested characters.",
            f"Conditions: {self.conditions()}. Both send around a ring: dense float32, Marsit one bit per parameter.",
        ]


def next_steps(link: EmulatedLink | None) -> list[str]:
    """Return commands to try after a demo over this link, a line each."""
    slow = link is not None and link.bytes_per_s < SLOW_BYTES_S
    rate, effect = ("1gbit", "a faster link leaves less") if slow else ("100mbit", "a slower link leaves more")
    steps = {
        f"mpicomp demo --link {rate}": f"{effect} to gain",
        "mpicomp run -n 2 -m mpicomp advise": "the method that pays on your network, for your model",
        "mpicomp help pytorch": "the same in your PyTorch loop: wrap its optimizer",
    }
    width = max(map(len, steps))
    return ["Next:", *(f"  {step.ljust(width)}   {purpose}" for step, purpose in steps.items())]


def text_table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as lines of aligned columns, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join([row[0].ljust(widths[0]), *cells[1:]]) for row, cells in zip(rows, lines, strict=True))


def _row(name: str, point: Point) -> tuple[str, ...]:
    return (
        name,
        str(point.step),
        f"{100 * point.accuracy:.1f} %",
        f"{1e-6 * point.bytes_sent:.1f}",
        f"{point.seconds:.1f}",
        f"{point.seconds_waiting:.1f}",
    )
