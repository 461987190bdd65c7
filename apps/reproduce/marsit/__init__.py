"""Marsit (Wu et al., DAC 2022, arXiv 2204.06787): Tables 1 and 2, Figures 1b, 3, 4b and 5; equal learning rates."""

from __future__ import annotations

from apps.reproduce.marsit.cascading import table_1
from apps.reproduce.marsit.fixed_rates import fixed_rates
from apps.reproduce.marsit.learning import table_2
from apps.reproduce.marsit.periods import figure_3
from apps.reproduce.marsit.signs import figure_1b
from apps.reproduce.marsit.step_time import figure_5

PARTS = (figure_1b, figure_5, table_1, figure_3, table_2, fixed_rates)  # the shortest first
