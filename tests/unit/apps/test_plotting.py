"""Figures that several programs draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from apps.plotting import Bars, Curve, curves, draw_bars, listed, new_figure, panels, save


def test_a_bar_is_made_of_its_parts_and_cut_off_at_the_end() -> None:
    figure = draw_bars([Bars("ring", {"a": (1, 2), "b": (3, 4)}, end=6.0)], ("one", "two"), "ms")
    drawn = [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]
    assert drawn == [(0, 1), (1, 2), (0, 3), (3, 3)]
    assert [text.get_text() for text in figure.axes[0].texts] == [" 3", " 6"]
    plt.close(figure)


def test_an_axis_that_cuts_bars_says_so() -> None:
    panels = [Bars("ring", {"a": (1, 2), "b": (3, 4)}, end=6.0), Bars("tree", {"a": (1, 2), "b": (3, 3)}, end=6.0)]
    figure = draw_bars(panels, ("one", "two"), "ms")
    assert [axes.get_xlabel() for axes in figure.axes] == ["ms (cut at 6)", "ms"]
    plt.close(figure)


@pytest.mark.parametrize(
    ("x_scale", "y_scale", "labels"),
    [
        ("linear", "linear", ("bytes", "seconds")),
        ("log", "linear", ("bytes (log scale)", "seconds")),
        ("log", "symlog", ("bytes (log scale)", "seconds (symlog scale)")),
    ],
)
def test_an_axis_that_is_not_linear_says_so(
    tmp_path: Path, x_scale: str, y_scale: str, labels: tuple[str, str]
) -> None:
    figure, ((axes, bare),) = new_figure(2, size=(4, 3), sharey=False)
    axes.set(xscale=x_scale, yscale=y_scale, xlabel="bytes", ylabel="seconds")
    bare.set_xscale("log")
    save(figure, tmp_path / "figure.png")
    assert (axes.get_xlabel(), axes.get_ylabel(), bare.get_xlabel()) == (*labels, "")


def test_a_label_that_speaks_of_its_scale_stays_as_it_is(tmp_path: Path) -> None:
    figure, ((axes,),) = new_figure(size=(4, 3))
    axes.set(yscale="log", ylabel="loss, on a scale of its own")
    save(figure, tmp_path / "figure.png")
    assert axes.get_ylabel() == "loss, on a scale of its own"


def test_values_are_listed_once_in_their_order() -> None:
    assert [listed(values) for values in ((4,), (4, 4), (4, 2), (4, 2, 4, 8))] == ["4", "4", "4 and 2", "4, 2 and 8"]


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
