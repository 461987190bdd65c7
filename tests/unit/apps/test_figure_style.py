"""Colours, markers and dashes of series: the same in all figures, and different within one."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from apps.figure_style import FAINT, INK, LOOKS, OTHERS, known_look, looks_of
from mpicomp.cli.demo import picture

FAMILIES = (
    ("dense", "marsit", "open mpi", "gloo"),
    ("dense", "marsit", "double-squeeze", "one-bit-adam", "scalecom", "sparseloco", "local steps"),
    ("float32", "aq-sgd", "directq"),
    ("ring", "torus", "tree", "double-tree", "halving-doubling", "marsit, one winner", "marsit, two winners"),
)
"""Series that stand together in a figure."""
# Linear RGB as eyes see it: those that have all cones, and those that lack the red or the green ones (Machado et al.,
# "A physiologically-based model for simulation of color vision deficiency", 2009, severity 1).
EYES = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LEAST_DISTANCE = 12
"""Distance of colours in CIE Lab; one that an eye just notices is 2.3."""


def lab(color: str, eye: str) -> NDArray[np.float64]:
    """The place of a colour in CIE Lab, as an eye sees it."""
    coded = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(EYES[eye] @ linear, 0, 1) / (0.9505, 1, 1.089)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(
    ("names", "color"),
    [
        (("Marsit", "marsit-100", "Marsit, K = 100", "marsit-100 clip=2.0"), "#0072b2"),
        (("dense", "fp32", "float32", "dense, ring", "mean gradients"), "#4d4d4d"),
        (("DoubleSqueeze", "double-squeeze, top-k", "DoubleSqueeze, 1-bit"), "#009e73"),
        (("AQ-SGD fw2 bw4", "AQ-SGD, 2 bits", "aq-sgd"), "#332288"),
    ],
)
def test_a_method_has_one_colour_however_a_program_writes_it(names: tuple[str, ...], color: str) -> None:
    assert {looks_of(["another", name])[name].color for name in names} == {color}


def test_the_longest_name_counts() -> None:
    assert known_look("Marsit, one winner") != known_look("Marsit")
    assert known_look("dense, every 8 local steps") == LOOKS["local steps"]
    assert known_look("K = 100") is None


def test_the_picture_of_the_demo_has_the_colours_of_the_figures() -> None:
    assert {name: LOOKS[name.lower()].color for name in picture.COLORS} == picture.COLORS
    assert (picture.INK, picture.FAINT) == (INK, FAINT)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("names", FAMILIES, ids=lambda names: names[1])
def test_colours_of_a_figure_differ_for_all_eyes(names: tuple[str, ...], eye: str) -> None:
    for one, other in combinations(names, 2):
        distance = np.linalg.norm(lab(LOOKS[one].color, eye) - lab(LOOKS[other].color, eye))
        assert distance > LEAST_DISTANCE, (one, other)


@pytest.mark.parametrize("names", FAMILIES, ids=lambda names: names[1])
def test_series_of_a_figure_differ_in_marker_or_dash(names: tuple[str, ...]) -> None:
    for one, other in combinations(names, 2):
        assert (LOOKS[one].marker, LOOKS[one].linestyle) != (LOOKS[other].marker, LOOKS[other].linestyle)


def test_series_of_one_method_and_unknown_ones_differ_too() -> None:
    names = ["Marsit, K = 100", "Marsit, K = none", "Marsit, K = 10", *(f"unknown {number}" for number in range(12))]
    looks = looks_of([*names, names[0]])
    assert list(looks) == names
    assert len(set(looks.values())) == len(names)
    assert {looks[name].color for name in names[:3]} == {LOOKS["marsit"].color}
    assert not {looks[name].color for name in names[3:]} & {look.color for look in LOOKS.values()}


def test_colours_can_be_seen_on_white() -> None:
    colors = [*OTHERS, *(look.color for look in LOOKS.values())]
    assert all(lab(color, "all cones")[0] < 80 for color in colors)
