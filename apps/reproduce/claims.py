"""Claims of a paper next to our findings, as a Markdown table; and the confidence in a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from apps.studies.results import Results

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Claim:
    """One line of a table: a claim, the figure of the paper and ours, and how the study here differs from the paper's.

    `where` is the place in the paper, such as ``"Fig. 2"``. `holds` is set if the claim is found here as well; None
    if nothing is judged.
    """

    where: str
    what: str
    paper: str
    ours: str
    holds: bool | None
    differs: str


Part = Callable[[Results, int, bool], tuple[list[Claim], list[Path]]]
"""Part of a study: from the results, the number of seeds and whether runs are long, it makes claims and figures."""


@dataclass(frozen=True)
class Difference:
    """A mean difference over seeds, with the half width of its confidence interval."""

    mean: float
    half_width: float

    @property
    def least(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def most(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    @property
    def below(self) -> bool:
        """Flag: the difference is below 0 with confidence."""
        return self.most < 0

    @property
    def above(self) -> bool:
        """Flag: the difference is above 0 with confidence."""
        return self.least > 0

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.half_width:.2g}"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Mean of ours - theirs over seeds that both share, with the interval of Student at 95 %."""
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"pairs need as many seeds on both sides, 2 at least, not {len(ours)} and {len(theirs)}")
    found = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    error = found.std(ddof=1) / np.sqrt(found.size)
    return Difference(float(found.mean()), float(stats.t.ppf((1 + CONFIDENCE) / 2, found.size - 1) * error))


def time_to_goal(seconds: Sequence[float], missed: int) -> str:
    """Format the seconds of each seed until a goal, or until the end of the run for the `missed` seeds."""
    mean = f"{np.mean(seconds):.3g} s"
    if not missed:
        return mean
    return f"not within {mean}" if missed == len(seconds) else f"{missed} of {len(seconds)} seeds not within the run"


def table(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    words = {True: "yes", False: "**no**", None: "–"}
    lines = ["| where | claim | paper | here | reproduced | differences |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {claim.where} | {claim.what} | {claim.paper} | {claim.ours} | {words[claim.holds]} | {claim.differs} |"
        for claim in claims
    ]
    return "\n".join(lines) + "\n"
