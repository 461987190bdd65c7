"""Figures that several programs draw: their style, titles, names next to lines, units, files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from PIL import Image

from apps.figure_style import WIDTH_INCHES
from apps.plotting import (
    Bars,
    Curve,
    curves,
    draw_bars,
    headline,
    in_units,
    listed,
    name_lines,
    new_figure,
    panels,
    readable,
    save,
    unit_ticks,
)


def test_a_bar_is_made_of_its_parts() -> None:
    figure = draw_bars([Bars("ring", {"a": (1, 2), "b": (3, 4)}), Bars("torus", {"a": ()})], ("one", "two"), "ms")
    drawn = [[(bar.get_x(), bar.get_width()) for bar in axes.patches] for axes in figure.axes]
    assert drawn == [[(0, 1), (1, 2), (0, 3), (3, 4)], []]
    assert [text.get_text() for text in figure.axes[0].texts] == [" 3", " 7"]
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
    figure, ((axes, bare),) = new_figure(2, height=3, sharey=False)
    axes.set(xscale=x_scale, yscale=y_scale, xlabel="bytes", ylabel="seconds")
    bare.set_xscale("log")
    save(figure, tmp_path / "figure.png")
    assert (axes.get_xlabel(), axes.get_ylabel(), bare.get_xlabel()) == (*labels, "")


def test_a_label_that_speaks_of_its_scale_stays_as_it_is(tmp_path: Path) -> None:
    figure, ((axes,),) = new_figure(height=3)
    axes.set(yscale="log", ylabel="loss, on a scale of its own")
    save(figure, tmp_path / "figure.png")
    assert axes.get_ylabel() == "loss, on a scale of its own"


def test_values_are_listed_once_in_their_order() -> None:
    assert [listed(values) for values in ((4,), (4, 4), (4, 2), (4, 2, 4, 8))] == ["4", "4", "4 and 2", "4, 2 and 8"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (25e6, "B", "25 MB"),
        (0.0514, "s", "51.4 ms"),
        (1e9, "bit/s", "1 Gbit/s"),
        (1.9996e3, "B", "2 kB"),
        (0, "s", "0 s"),
    ],
)
def test_values_have_units_that_people_use(value: float, unit: str, text: str) -> None:
    assert in_units(value, unit) == text


def test_ticks_have_units() -> None:
    figure, ((axes,),) = new_figure(height=3)
    axes.plot([1e6, 4e8], [1e-3, 1])
    axes.set(xscale="log")
    unit_ticks(axes.xaxis, "B", (1e6, 1e8))
    unit_ticks(axes.yaxis, "s")
    figure.draw_without_rendering()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1 MB", "100 MB"]
    assert "200 ms" in [text.get_text() for text in axes.get_yticklabels()]
    plt.close(figure)


def test_a_title_has_few_lines_and_never_ends_one_between_a_number_and_its_unit() -> None:
    figure, _ = new_figure(height=3)
    title = (
        "A call hides 92 % of its computing behind sending at 500 Mbit/s, 15 % of sending behind computing at 8 Gbit/s"
    )
    headline(figure, title, "Four nodes.")
    lines = figure.get_suptitle().split("\n")
    assert " ".join(lines).replace("\N{NO-BREAK SPACE}", " ") == title
    assert len(lines) == 2
    assert not any(line[-1].isdigit() for line in lines)
    assert abs(len(lines[0]) - len(lines[1])) < 15
    assert figure.get_supxlabel() == "Four nodes."
    plt.close(figure)


def test_lines_are_named_beside_their_ends_and_names_do_not_overlap() -> None:
    figure, ((axes,),) = new_figure(height=3)
    for name, end in (("one", 1.0), ("two", 1.001), ("three", 1.002), ("far", 3.0)):
        axes.plot([0, 1], [0, end], label=name)
    axes.plot([0, 1], [2, 2])
    name_lines(axes)
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert list(boxes) == ["one", "two", "three", "far"]
    ordered = sorted(boxes.values(), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(ordered))
    assert all(box.x1 <= figure.bbox.width for box in boxes.values())
    plt.close(figure)


def test_text_in_a_light_colour_is_dark_enough_to_read() -> None:
    assert readable("#000000") == (0, 0, 0)
    for color in ("#ffffff", "#56b4e9", "#f0e442"):
        red, green, blue = readable(color)
        assert 0.21 * red + 0.72 * green + 0.07 * blue < 0.43


def test_figures_are_saved_and_forgotten(tmp_path: Path) -> None:
    plt.close("all")  # those of other tests
    lines = [Curve("one", (1, 2), ((1, 2), (3, 4)))]
    drawn = [
        curves(
            tmp_path / "new" / "curves.png", lines, "x", "y", log=True, log_x=True, title="One rises", note="By hand."
        ),
        panels(tmp_path / "panels.png", [[("left", lines), ("right", lines), ("third", lines)]], "x", "y"),
        panels(tmp_path / "legends.png", [[("left", lines), ("right", lines)]], "x", "y", legends=True),
        save(draw_bars([Bars("ring", {"a": (1, 2)})], ("one", "two"), "ms"), tmp_path / "bars.png"),
    ]
    assert all(np.ptp(plt.imread(path)) > 0 for path in drawn)
    assert not plt.get_fignums()


def test_an_image_is_opaque_of_one_width_small_and_keeps_the_colours_of_small_marks(tmp_path: Path) -> None:
    figure, ((axes,),) = new_figure(height=3)
    axes.imshow(np.linspace(0, 1, 10_000).reshape(100, 100), aspect="auto")  # needs more colours than there are
    axes.plot(50, 50, color="#0072b2", marker="s")
    path = save(figure, tmp_path / "figure.png")
    with Image.open(path) as image:
        assert image.mode == "P"
        assert "transparency" not in image.info
        assert image.width == round(WIDTH_INCHES * 200)
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    nearest = np.abs(pixels - (0x00, 0x72, 0xB2)).max(axis=1).min()
    assert nearest <= 8
    assert (pixels[0] == 255).all()
