"""The two parts of the error of a one-bit vote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apps.reproduce import vote_errors
from apps.reproduce.vote_errors import errors, measure
from apps.studies.results import Results


def test_the_parts_sum_to_the_mean_squared_error_of_drawn_votes() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(8, 50) + torch.randn(50)
    mean, size = vectors.mean(0), vectors.abs().mean()
    positive = (vectors > 0).float().mean(0)
    drawn = torch.where(torch.rand(20_000, 50) < positive, size, -size)
    error = float((drawn - mean).square().mean(0).sum() / mean.square().sum())
    assert sum(errors(vectors, mean)) == pytest.approx(error, rel=0.02)


def test_voters_that_agree_on_one_magnitude_make_no_error() -> None:
    vector = torch.tensor([0.5, -0.5, 0.5])
    assert errors(vector.expand(4, 3), vector) == (0.0, 0.0)


def test_node_means_lessen_the_noise_of_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 12, "FIRST": 8, "EVERY": 2}.items():
        monkeypatch.setattr(vote_errors, name, value)
    found = measure(Results(tmp_path), "digits", ("adam", 0.001), ranks=4, per_node=2, seed=0)
    assert 0 < found["nodes"][0] < found["ranks"][0]
    assert measure(Results(tmp_path), "digits", ("adam", 0.001), ranks=4, per_node=2, seed=0) == found
