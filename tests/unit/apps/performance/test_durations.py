"""Tests of figures of timed calls."""

from __future__ import annotations

import numpy as np

from apps.performance.durations import summary


def test_a_summary_has_median_and_minimum() -> None:
    assert summary(np.array([1.0, 4.0, 2.0])) == {"median_s": 2.0, "min_s": 1.0}
