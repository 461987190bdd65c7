"""Figures that several programs draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from apps.plotting import Bars, Curve, curves, draw_bars, panels, save


def test_a_bar_is_made_of_its_parts_and_cut_off_at_the_end() -> None:
    figure = draw_bars([Bars("ring", {"a": (1, 2), "b": (3, 4)}, end=6.0)], ("one", "two"), "ms")
    drawn = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert drawn == [(0, 1), (1, 2), (0, 3), (3, 3)]
    assert [text.get_text() for text in figure.axes[0].texts] == [" 3", " 6"]
    plt.close(figure)


def test_figures_are_saved_and_forgotten(tmp_path: Path) -> None:
    plt.close("all")  # those of other tests
    lines = [Curve("one", (1, 2), ((1, 2), (3, 4)))]
    drawn = [
        curves(tmp_path / "new" / "curves.png", lines, "x", "y", log=True, log_x=True),
        panels(tmp_path / "panels.png", [[("left", lines), ("right", lines)]], "x", "y"),
        save(draw_bars([Bars("ring", {"a": (1, 2)})], ("one", "two"), "ms"), tmp_path / "bars.png"),
    ]
    assert all(np.ptp(plt.imread(path)) > 0 for path in drawn)
    assert not plt.get_fignums()
