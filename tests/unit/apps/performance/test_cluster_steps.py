"""Training steps on the emulated cluster: time hidden behind backward, and a comparison with DDP's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from apps.environment import environment
from apps.performance.cluster import backward, picture_data, steps
from apps.records import Record
from collectives import Communicator

LINKS = {"links": [{"bits_per_s": 1e9}], "settings": {"nodes": 2, "rate": "1gbit", "between": "none"}}


def test_backward_is_measured_with_and_without_overlap_and_drawn(tmp_path: Path) -> None:
    with Communicator() as comm:
        record: Record = backward.measure_here(comm, 3000, ("dense", "Marsit"), repeats=2) | LINKS
    assert [row["method"] for row in record["rows"]] == ["dense"] * 3 + ["Marsit"] * 3
    for row in record["rows"]:
        assert row["both_s"] > 0
        assert 0 <= row["exposed_s"] <= row["both_s"]
        assert 0 <= row["computing_s"] <= row["communication_s"]
    text = backward.render([record])
    assert text.count("| Marsit | ") == 3
    parts = picture_data.condense([], [], [], [record], [])
    assert [path.name for path in picture_data.draw_parts(parts, tmp_path)] == ["cluster-backward.png"]


def test_a_step_that_takes_much_longer_than_the_longer_part_is_marked() -> None:
    row = {"method": "Marsit", "factor": 1.0, "batch": 8, "backward_s": 0.1, "communication_s": 0.05}
    row |= {"computing_s": 0.05, "both_s": 0.15, "exposed_s": 0.01}
    record = {"rows": [row], "n": 10, "environment": environment(), **LINKS}
    assert "| 150 | 1.50 † | 10.0 |" in backward.render([record])


def test_a_column_has_ratios_as_they_were_measured() -> None:
    asked_and_measured = ((0.5, 18.2e-3, 66.7e-3), (1.0, 113e-3, 78.4e-3), (2.0, 236e-3, 84.6e-3))
    rows = [
        {"method": "Marsit", "factor": factor, "batch": batch, "backward_s": backward_s, "communication_s": other_s}
        | {"computing_s": other_s, "both_s": 0.26, "exposed_s": 0.03}
        for batch, (factor, backward_s, other_s) in zip((1, 40, 136), asked_and_measured, strict=True)
    ]
    record: Record = {"part": "backward", "n": 3000, "environment": environment(), "rows": rows} | LINKS
    assert [line.split("|")[3].strip() for line in backward.render([record]).splitlines()[2:5]] == [
        "0.27", "1.44", "2.79",
    ]  # fmt: skip


def test_whole_steps_of_all_implementations_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model, inputs = nn.Linear(8, 2), torch.ones(4, 8)
        return model, lambda wrapped: wrapped(inputs).square().mean()

    monkeypatch.setattr(steps, "build", build)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with Communicator(MPI.COMM_SELF) as comm:
        record: Record = steps.measure_here(comm, "mlp", 2, "127.0.0.1") | LINKS
    assert [row["name"] for row in record["rows"]] == [*steps.GLOO, *steps.OURS]
    assert record["tried"] == 0  # one rank has nothing to choose
    text = steps.render([record])
    assert "**mlp, 18 parameters, 2 nodes**" in text
    assert "(1.00×)" in text
    assert f"| {steps.COMPARED} | " in text
