"""Which of the predicted ways is advised, and why those that are predicted to be faster are not."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpicomp.cli.advise.learning import LEARNING, Grade

Row = dict[str, Any]
WORTH = 1.05
"""A step so many times as fast is worth the noise of compressing, or a worse learning record; below, it is not."""
ALIKE = 1.2
"""All-reduces whose predictions are less far apart cannot be told apart: predictions come as near to measurements."""


class Choice(NamedTuple):
    """The best way that compresses, whether it is worth it, and seconds of a step that does not compress."""

    row: Row
    compress: bool
    dense_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step as advised."""
        return float(self.row["step_s"]) if self.compress else self.dense_s


def dense_step(record: dict[str, Any]) -> float:
    """Seconds of a step with the fastest dense sum that there is, MPI's included."""
    found = [record["dense_s"], *(row["seconds"] for row in record["rows"] if row["method"] == "dense")]
    if record["mpi_s"] is not None:
        found.append(record["mpi_s"])
    return float(min(found) + record["compute_s"])


def choose(record: dict[str, Any]) -> Choice:
    """Of the ways that are about as fast as the fastest, the fastest one of the method that has learned best.

    What is there to compare with is chosen only where nothing else was asked for.
    """
    dense_s = dense_step(record)
    compressed = [row for row in record["rows"] if row["method"] != "dense"]
    eligible = [row for row in compressed if not row["compared"]] or compressed
    fastest = min(eligible, key=lambda row: float(row["step_s"]))
    worthy = [row for row in eligible if dense_s >= WORTH * row["step_s"]]
    alike = [row for row in worthy if _alike(fastest, row)] or [fastest]
    best = min(alike, key=lambda row: (LEARNING[row["method"]].grade, row["step_s"]))
    return Choice(best, bool(worthy), dense_s)


def _alike(fastest: Row, row: Row) -> bool:
    return bool(row["step_s"] < WORTH * fastest["step_s"] or row["seconds"] < ALIKE * fastest["seconds"])


def passed_over(record: dict[str, Any], choice: Choice) -> list[str]:
    """A line for each method that is predicted to be faster than the advice: over what, and why it is not advised."""
    faster: dict[str, list[Row]] = {}
    for row in record["rows"]:
        if row["method"] != "dense" and row["step_s"] < choice.step_s:
            faster.setdefault(row["method"], []).append(row)
    return [
        f"{method} over {', '.join(row['topology'] for row in rows)}: {_reason(method, rows, choice)}"
        for method, rows in faster.items()
    ]


def _reason(method: str, rows: list[Row], choice: Choice) -> str:
    learned, chosen = LEARNING[method], choice.row["method"]
    if learned.grade is Grade.COMPARED and not choice.row["compared"]:
        return f"it {learned.told}, and is there to compare with"
    less = f"a step is {1 - min(row['step_s'] for row in rows) / choice.step_s:.1%} shorter"
    if not choice.compress:
        return f"{less} than without, which is not worth the noise of compressing"
    return (
        f"{less}, too little to prefer it to {chosen}, which has learned better: {chosen} {LEARNING[chosen].told}, "
        f"and {method} {learned.told}"
    )
