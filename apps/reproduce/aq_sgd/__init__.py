"""AQ-SGD (Wang et al., NeurIPS 2022): Figures 1b, 3, 4, 5, 7, 9 and 10."""

from __future__ import annotations

from functools import partial

from apps.reproduce.aq_sgd.against_time import figure_4
from apps.reproduce.aq_sgd.both import figure_5
from apps.reproduce.aq_sgd.classification import figure_3_classification
from apps.reproduce.aq_sgd.convergence import figure_1b, figure_3
from apps.reproduce.aq_sgd.scratch import figure_7
from apps.reproduce.aq_sgd.split_learning import figure_10
from apps.reproduce.aq_sgd.variations import figure_9

PARTS = (figure_3, figure_3_classification, figure_1b, figure_7, figure_9, figure_4, figure_5, figure_10)
QUICK = tuple(partial(part, quick=True) for part in PARTS)
