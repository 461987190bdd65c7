"""Verdicts on the accuracy that Marsit loses between nodes, against its loss among all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.records import Record
from apps.reproduce import per_node
from apps.reproduce.claims import Claim
from apps.reproduce.marsit.fixed_rates import RATES, Runs
from apps.reproduce.networks import Task, train
from apps.reproduce.per_node import (
    CONTROLS,
    DENSE,
    DIGITS,
    FASHION_MNIST,
    ISLANDS,
    MEAN_OF_UPDATES,
    METHODS,
    PAIRS,
    digits,
    explain,
    fashion_mnist,
    judge,
    methods_at,
)
from apps.studies.results import Results
from mpicomp import Marsit, PerNode
from mpicomp.algorithms import Algorithm

ADAM = ("adam", 0.001)


def runs_of(points: dict[str, float], rates: Sequence[tuple[str, float]] = RATES) -> Runs:
    """Return runs of three seeds, in which each method loses so many points at every rate."""

    def runs(lost: float) -> list[dict[str, Any]]:
        return [{"accuracy": 0.9 + seed / 100 - lost / 100} for seed in range(3)]

    return {(*rate, method): runs(points.get(method, 0.0)) for rate in rates for method in METHODS}


def verdicts(*, flat: float, nodes: float) -> list[Claim]:
    """Judge runs that lose so many points at every rate."""
    found = runs_of(dict.fromkeys(PAIRS, flat) | dict.fromkeys(PAIRS.values(), nodes))
    return judge(found, DIGITS, RATES, PAIRS)


def test_half_of_the_loss_is_the_most() -> None:
    assert {claim.holds for claim in verdicts(flat=0.8, nodes=0.3)} == {True}
    assert {claim.holds for claim in verdicts(flat=0.8, nodes=0.5)} == {False}
    claims = verdicts(flat=0.8, nodes=0.3)
    assert len(claims) == len(PAIRS) * (len(RATES) + 1)
    assert claims[0].ours.startswith("-0.30, Marsit among all ranks -0.80; difference +0.5 ± ")


def test_where_nothing_is_lost_there_is_no_verdict() -> None:
    assert {claim.holds for claim in verdicts(flat=-0.1, nodes=0.2)} == {None}


def test_one_rate_alone_is_not_pooled() -> None:
    found = runs_of({"Marsit, K = 100": 0.8}, [ADAM])
    (claim,) = judge(found, FASHION_MNIST, [ADAM], {"Marsit, K = 100": "per node, K = 100"})
    assert claim.holds
    assert "one image is 0.01 points" in claim.differs
    assert claim.differs.startswith("fashion-mnist, ")


def test_controls_are_reported_with_adam_alone() -> None:
    found = runs_of({"Marsit, K = 100": 0.8, "per node, K = 100": 0.7, MEAN_OF_UPDATES: 0.6, ISLANDS: 0.2})
    claims = explain(found, DIGITS, RATES)
    assert [claim.what.partition(",")[0] for claim in claims] == [
        f"adam {lr:g}: {control}" for lr in (0.001, 0.003) for control in ("K = 1", "islands")
    ]
    assert {claim.holds for claim in claims} == {None}
    mean_of_updates, islands = (claim.ours for claim in claims[:2])
    assert mean_of_updates.startswith("-0.6 ± ")
    assert "; Marsit, K = 100 less K = 1 -0.2 ± " in mean_of_updates
    assert islands.startswith("-0.2 ± ")
    assert "; per node, K = 100 less islands, K = 100 -0.5 ± " in islands


def test_pairs_are_one_method_with_nodes_and_without() -> None:
    for flat, nodes in PAIRS.items():
        assert PerNode(METHODS[flat]) == METHODS[nodes]
        assert isinstance(METHODS[flat], Marsit)
    # the global batches of the learning tables, 64 and 256
    assert DIGITS.task.options[:4] == ("--dataset", "digits", "--batch", "8")
    assert FASHION_MNIST.task.options[:4] == ("--dataset", "fashion-mnist", "--batch", "32")


def test_parts_train_their_dataset_at_the_rates_and_seeds_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, str, bool, tuple[str, ...], int]] = []

    def note(
        results: Results, name: str, task: Task, method: Algorithm, seed: int, own_options: Sequence[str]
    ) -> Record:
        trained.append((task.options[1], repr(method), task.islands, tuple(own_options), seed))
        return {"accuracy": 0.9 - seed / 1000}

    def run_here(cases: Any, seeds: int, make: Any) -> Any:
        return {case: [make(case, seed)() for seed in range(seeds)] for case in cases}

    monkeypatch.setattr(per_node, "trained", note)
    monkeypatch.setattr(per_node, "run_seeds", run_here)
    counts: dict[tuple[str, bool], int] = {}
    for part in (digits, fashion_mnist):
        for full in (False, True):
            trained.clear()
            part(Results(tmp_path), 10, full)
            counts[part.__name__, full] = len(trained)
            assert len(set(trained)) == len(trained)
            assert {dataset for dataset, *_ in trained} == {part.__name__.replace("_", "-")}
            assert {method for _, method, islands, *_ in trained if islands} == {repr(METHODS[ISLANDS])}
    every_rate = sum(len(methods_at(rate, PAIRS)) for rate in RATES)
    assert counts["digits", True] == counts["fashion_mnist", True] == 5 * every_rate
    assert counts["digits", False] == 3 * (5 * 3 + 2 * len(CONTROLS))
    assert counts["fashion_mnist", False] == 3 * (3 + len(CONTROLS))


def test_mean_of_updates_is_the_same_between_nodes() -> None:
    task = replace(DIGITS.task, ranks=4, options=(*DIGITS.task.options, "--epochs", "1", "--hidden", "8"))
    flat, nodes, dense = (
        train(task, method, 0, ("--optimizer", "adam"))["epochs"][-1]["test_loss"]
        for method in (METHODS[MEAN_OF_UPDATES], PerNode(METHODS[MEAN_OF_UPDATES]), METHODS[DENSE])
    )
    assert nodes == pytest.approx(flat, rel=1e-4)
    assert abs(dense - flat) > 0.01 * flat  # an Adam on each rank is another optimizer
