"""AQ-SGD (Wang et al., NeurIPS 2022): Figures 1b, 3, 5, 9 and 10, over MPI."""

from __future__ import annotations

from apps.reproduce.aq_sgd.both import figure_5
from apps.reproduce.aq_sgd.convergence import figure_1b, figure_3
from apps.reproduce.aq_sgd.split_learning import figure_10
from apps.reproduce.aq_sgd.variations import figure_9

PARTS = (figure_3, figure_1b, figure_10, figure_5, figure_9)
