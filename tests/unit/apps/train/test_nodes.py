"""Runs between nodes: resumed to the bit on the same nodes, and continued on others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apps.train.__main__ import train
from apps.train.agreement import JobError
from apps.train.options import parse
from mpicomp import run_local

ARGV = ("--method", "marsit", "--hidden", "8", "--per-node", "--bucket-mb", "0.001", "--full-precision-every", "3")


def run(folder: Path, ranks: int, nodes: int | None, *argv: str) -> dict[str, Any]:
    """Train on ranks that are threads, `nodes` of them a node; the last line of the record."""
    options = parse([*ARGV, "--checkpoint", str(folder), "--json", str(folder / "run.json"), *argv])
    run_local(ranks, lambda comm: train(options, comm), ranks_per_node=nodes)
    return json.loads((folder / "run.json").read_text().splitlines()[-1])


def test_two_epochs_and_two_more_on_the_same_nodes_are_four_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4, 2, "--epochs", "4")
    run(tmp_path / "parts", 4, 2, "--epochs", "2")
    resumed = run(tmp_path / "parts", 4, 2, "--epochs", "4", "--resume")
    assert whole["parameters_sha256"] == resumed["parameters_sha256"]
    assert (whole["per_node"], whole["nodes"]) == ("auto", [2, 2])


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 4), (4, 1), (3, 2), (2, 2), (1, None)])
def test_a_run_goes_on_on_other_nodes(
    ranks: int, per_node: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, 4, 2, "--epochs", "2")
    record = run(tmp_path, ranks, per_node, "--epochs", "4", "--resume")
    assert record["epochs"] == 4
    assert record["accuracy"] > 0.6
    assert "step-00000044, which 4 ranks on 2 nodes wrote" in capsys.readouterr().out


def test_a_run_between_nodes_is_not_resumed_as_one_between_ranks(tmp_path: Path) -> None:
    run(tmp_path, 2, 1, "--epochs", "1")
    options = parse(["--hidden", "8", "--epochs", "2", "--checkpoint", str(tmp_path), "--resume"])
    with pytest.raises(JobError, match="per_node was 'auto' and is None"):
        run_local(2, lambda comm: train(options, comm))


def test_with_one_rank_on_each_node_a_run_is_that_of_the_method(tmp_path: Path) -> None:
    whole = run(tmp_path / "nodes", 2, 1, "--epochs", "1")
    options = parse([*ARGV, "--epochs", "1", "--json", str(tmp_path / "run.json")])
    options.per_node = None
    run_local(2, lambda comm: train(options, comm))
    plain = json.loads((tmp_path / "run.json").read_text().splitlines()[-1])
    assert (plain["per_node"], plain["parameters_sha256"]) == (None, whole["parameters_sha256"])
