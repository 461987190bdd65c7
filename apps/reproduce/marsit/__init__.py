"""Marsit (Wu et al., DAC 2022, arXiv 2204.06787): Tables 1 and 2, Figures 1b, 3, 4b and 5."""

from __future__ import annotations

from pathlib import Path

from apps.reproduce.claims import Claim
from apps.reproduce.marsit.fixed_rates import fixed_rates
from apps.reproduce.marsit.learning import table_1, table_2
from apps.reproduce.marsit.periods import figure_3
from apps.reproduce.marsit.signs import figure_1b
from apps.reproduce.marsit.step_time import figure_5
from apps.reproduce.results import Book

PARTS = (figure_1b, figure_5, table_1, figure_3, table_2, fixed_rates)


def run(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """All parts, the shortest first; returns the claims and the figures."""
    claims, figures = [], []
    for part in PARTS:
        found, drawn = part(book, seeds, full)
        claims += found
        figures += drawn
    return claims, figures
