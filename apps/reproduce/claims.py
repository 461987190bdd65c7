"""A paper's claims beside what was found, as a Markdown table; and how sure a difference is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Claim:
    """One line of a table.

    Attributes
    ----------
    where : str
        In the paper: ``"Fig. 2"``.
    what : str
        What is claimed.
    paper, ours : str
        Its figure, and the one found here.
    holds : bool or None
        Whether the claim is found here as well; None: there is nothing to judge.
    differs : str
        What is different here.
    """

    where: str
    what: str
    paper: str
    ours: str
    holds: bool | None
    differs: str


@dataclass(frozen=True)
class Difference:
    """A mean difference over seeds, with the half width of its confidence interval."""

    mean: float
    half_width: float

    @property
    def below(self) -> bool:
        """Whether it is below 0 with confidence."""
        return self.mean + self.half_width < 0

    @property
    def above(self) -> bool:
        """Whether it is above 0 with confidence."""
        return self.mean - self.half_width > 0

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ± {self.half_width:.2g}"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Mean of ours - theirs over seeds that both share, with Student's interval at 95 %.

    Raises
    ------
    ValueError
        There are fewer than two pairs, or the numbers differ.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise ValueError(f"pairs need as many seeds on both sides, 2 at least, not {len(ours)} and {len(theirs)}")
    found = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    error = found.std(ddof=1) / np.sqrt(found.size)
    return Difference(float(found.mean()), float(stats.t.ppf((1 + CONFIDENCE) / 2, found.size - 1) * error))


def table(claims: Sequence[Claim]) -> str:
    """Markdown."""
    words = {True: "yes", False: "**no**", None: "–"}
    lines = ["| where | claim | paper | here | reproduced | what differs |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {claim.where} | {claim.what} | {claim.paper} | {claim.ours} | {words[claim.holds]} | {claim.differs} |"
        for claim in claims
    ]
    return "\n".join(lines) + "\n"
