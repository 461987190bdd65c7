"""The papers' claims: how differences are judged, results kept, and linear models trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apps.reproduce.book import Book
from apps.reproduce.claims import Claim, paired, table
from apps.reproduce.ecq_sgd import growth, relative_error
from apps.reproduce.linear import regression, synthetic, train
from mpicomp import ECQSGD, QSGD, Dense
from mpicomp.codecs import Quantizer


def test_a_difference_is_sure_only_if_its_interval_leaves_out_zero() -> None:
    sure = paired([1.0, 1.1, 0.9, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert sure.mean == pytest.approx(-1)
    assert sure.half_width == pytest.approx(3.182 * np.std([1.0, 1.1, 0.9, 1.0], ddof=1) / 2, rel=1e-3)
    assert sure.below
    assert not sure.above
    unsure = paired([1.0, 3.0], [2.0, 2.0])
    assert not unsure.below
    assert not unsure.above
    with pytest.raises(ValueError, match="2 at least, not 1 and 1"):
        paired([1.0], [2.0])


def test_a_table_says_what_was_not_found_again() -> None:
    claims = [Claim("Fig. 1", "a", "1", "2", holds, "less") for holds in (True, False, None)]
    lines = table(claims).splitlines()[2:]
    assert ["| yes |" in lines[0], "| **no** |" in lines[1], "| – |" in lines[2]] == [True] * 3


def test_what_is_done_is_not_done_again_unless_settings_differ(tmp_path: Path) -> None:
    made = []

    def make() -> dict[str, int]:
        made.append(1)
        return {"found": len(made)}

    assert Book(tmp_path).record("a", {"n": (1, 2)}, make) == {"found": 1}
    assert Book(tmp_path).record("a", {"n": [1, 2]}, make) == {"found": 1}
    assert Book(tmp_path).record("a", {"n": [1, 3]}, make) == {"found": 2}
    assert Book(tmp_path, fresh=True).record("a", {"n": [1, 3]}, make) == {"found": 3}
    assert Book(tmp_path).seconds() >= 0


def test_training_approaches_what_made_the_data_and_counts_bits() -> None:
    problem, options = synthetic(64, 0, samples=500), {"ranks": 3, "steps": 150, "lr": 0.05, "batch": 16, "seed": 0}
    dense = train(problem, Dense(), **options)
    coded = train(problem, QSGD(4, 64, "l2"), **options)
    assert dense["steps"] == [0, 50, 100, 150]
    assert dense["distance"][-1] < 0.2 * dense["distance"][0]
    assert dense["loss"][-1] < dense["loss"][0]
    assert dense["bits"] == 32 * 64
    assert coded["bits"] == 8 * QSGD(4, 64, "l2").codec.nbytes(64)
    assert coded["distance"][-1] < 0.2 * coded["distance"][0]
    assert train(problem, QSGD(4, 64, "l2"), **options) == coded


def test_residuals_are_bounded_below_the_edge_and_grow_beyond() -> None:
    codec = Quantizer(256, 1, "l2")
    edge = 2 / (1 + relative_error(codec, 256))
    assert growth(codec, 256, 0.7 * edge, 400) < 1.5 < growth(codec, 256, 1.6 * edge, 400)


def test_methods_with_and_without_a_residual_see_the_same_samples() -> None:
    problem = regression(1, samples=400)
    options = {"ranks": 2, "steps": 2, "lr": 0.01, "batch": 8, "seed": 3}
    first = [train(problem, method, **options)["loss"][0] for method in (Dense(), ECQSGD(bucket=90))]
    assert first[0] == first[1]
