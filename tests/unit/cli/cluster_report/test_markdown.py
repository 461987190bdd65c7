"""Reports as Markdown."""

from __future__ import annotations

from mpicomp.cli.cluster_report import markdown
from mpicomp.cli.cluster_report.validation import problems
from tests.cluster_reports import sample


def test_a_page_has_machine_links_and_medians() -> None:
    lines = markdown.page(sample()).splitlines()
    assert lines[0] == "# Report of 2 x 2 ranks (nodes x ranks of a node)"
    assert "| dense ring | 25.0 |" in lines
    assert "| MPI ring | 20.0 |" in lines
    assert "| marsit | 1.00 (20.00) |" in lines
    assert "- Links: 50.0 us, 1.00 Gbit/s" in lines
    assert "- 400 MB: too little memory" in lines
    assert any("16 cores, 128 GB, 4 NVIDIA H100 80GB HBM3" in line for line in lines)
    assert any(line.endswith("median in ms: alone 200, dense 600, relay 300") for line in lines)
    assert "torch" not in "\n".join(lines)


def test_a_training_that_was_left_out_has_its_reason() -> None:
    report = sample()
    report["training"] |= {"skipped": "no torch", "steps": []}
    assert "median in ms: PyTorch is not installed\n" in markdown.page(report)


def test_a_training_that_failed_has_its_error() -> None:
    report = sample()
    report["training"] |= {"skipped": "error: RuntimeError: out of memory", "steps": []}
    assert problems(report) == []
    assert "median in ms: error: RuntimeError: out of memory\n" in markdown.page(report)


def test_nodes_of_different_sizes_are_listed() -> None:
    report = sample()
    report["ranks_per_node"] = [4, 3]
    assert markdown.ranks(report) == "4 + 3"
