"""The table and the figure, from records."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.finetune.report import Estimate, Runs, distances, draw, finding, markdown, summary


def record(accuracy: float, loss: float, bits: float) -> dict[str, object]:
    return {"steps": [1, 2], "accuracy": [0.5, accuracy], "loss": [1.0, loss], "bits_per_element": bits}


RUNS: Runs = {
    "dense": [record(0.80, 0.5, 32.0), record(0.84, 0.7, 32.0)],
    "Marsit-100": [record(0.81, 0.5, 1.5), record(0.83, 0.5, 1.5)],
}


def test_the_table_has_means_standard_errors_and_paired_differences() -> None:
    dense, marsit = (line.split(" | ")[2:] for line in markdown(RUNS).splitlines()[2:4])
    assert dense == ["82.00 ± 2.00", "", "0.60 ± 0.10", "32.00 |"]
    assert marsit == ["82.00 ± 1.00", "+0.00 ± 1.00", "0.50 ± 0.00", "1.50 |"]


def test_the_sentence_says_how_far_apart_the_methods_are() -> None:
    text = distances({"a": [80.0, 82.0], "b": [84.0, 84.0]})
    assert "2 seeds, 1035 test examples. Between the best method, b, and the last, a, lie 3.00 points." in text
    assert "One standard error of an accuracy is 1.14 to 1.58 points: 1.14 or more by the choice" in text


def test_a_standard_error_is_that_of_a_mean() -> None:
    assert Estimate.of([1.0, 3.0]) == Estimate(2.0, pytest.approx(1.0))


def test_a_figure_is_written_whose_title_has_the_numbers_of_the_summary(tmp_path: Path) -> None:
    runs = RUNS | {"ScaleCom": [record(0.79, 0.5, 4.0), record(0.82, 0.5, 4.0)]}
    found = summary(runs)
    assert found["methods"][1] == {
        "name": "Marsit-100",
        "accuracy": 82.0,
        "error": pytest.approx(1),
        "bits_per_element": 1.5,
    }
    assert (
        finding(found["methods"])
        == "Fine-tuning with 8 to 21 times fewer bits ends 0.0 to 1.5 points below dense's accuracy"
    )
    assert draw(found, tmp_path / "figure.png").stat().st_size > 1000
