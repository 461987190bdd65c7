"""AQ-SGD tried again: which jobs are started, and how claims are judged from their losses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.reproduce.aq_sgd import PARTS, runs, split_learning
from apps.reproduce.results import Results

STEPS = 60
GAPS = {"fp32": 0.0, "AQ-SGD": 0.01, "DirectQ": 0.3}
"""Nats above float32."""


class Jobs:
    """Stands for MPI jobs, whose runs end in losses that are known."""

    def __init__(self, gaps: dict[str, float]) -> None:
        self.gaps, self.started = gaps, list[int]()

    def call_on_ranks(self, function: Any, arguments: dict[str, Any], ranks: int) -> dict[str, Any]:
        self.started.append(ranks)
        if "save" in arguments:
            Path(arguments["save"]).touch()
        return {"runs": [self._record(options) for options in arguments["runs"]]}

    def _record(self, options: dict[str, Any]) -> dict[str, Any]:
        full = options["forward_bits"] == 32
        name = "fp32" if full else "DirectQ" if options["direct"] else "AQ-SGD"
        noise = 1e-4 * np.random.default_rng([options["seed"], options["forward_bits"]]).normal()
        losses = [2 - 0.1 * epoch + self.gaps[name] + noise for epoch in range(options["epochs"])]
        sizes = {"activations": [1.0] * STEPS, "changes": [float("nan")] + [1 / step for step in range(1, STEPS)]}
        return {
            "epochs": [{"epoch": k + 1, "validation_loss": loss} for k, loss in enumerate(losses)],
            "losses": np.linspace(3, 2, STEPS).tolist(),
            **(sizes if options["magnitudes"] else {}),
        }


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path)


def judged(results: Results, gaps: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Jobs]:
    jobs = Jobs(gaps)
    monkeypatch.setattr(runs, "call_on_ranks", jobs.call_on_ranks)
    claims = []
    for part in PARTS:
        if part is not split_learning.figure_10:
            found, written = part(results, 2, False)
            assert all(path.exists() for path in written)
            claims += found
    return {f"{claim.where}: {claim.what}": claim.holds for claim in claims}, jobs


def test_small_gaps_and_a_worse_directq_are_found_again(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts, jobs = judged(results, GAPS, monkeypatch)
    assert [holds for holds in verdicts.values() if holds is not None] == [True] * 8
    # for each of two seeds: weights to begin with; fewer stages; methods, a grid, messages in few bits
    assert Counter(jobs.started) == {1: 2, 2: 2, 4: 2 * (7 + 4 + 3)}


def test_larger_gaps_are_not(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts, _ = judged(results, {"fp32": 0.0, "AQ-SGD": 0.2, "DirectQ": 0.3}, monkeypatch)
    failed = [what for what, holds in verdicts.items() if holds is False]
    assert "Fig. 3: AQ-SGD fw2 bw4 converges almost as float32" in failed
    assert "Fig. 3: AQ-SGD fw4 bw8 converges almost as float32" in failed
    assert "Fig. 3: DirectQ fw2 bw4 ends significantly worse than AQ-SGD" in failed
    assert "Fig. 5a: DirectQ with compressed gradients ends worse" not in failed


def test_weights_that_are_gone_are_made_again(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    _, jobs = judged(results, GAPS, monkeypatch)
    (results.folder / "weights-1.safetensors").unlink()
    before = len(jobs.started)
    runs.trained(results, {}, 2)
    assert jobs.started[before:] == [1]
