"""Verdicts on the accuracy that Marsit loses between nodes, against its loss among all ranks."""

from __future__ import annotations

from typing import Any

from apps.reproduce.claims import Claim
from apps.reproduce.marsit.fixed_rates import RATES, Runs
from apps.reproduce.per_node import METHODS, PAIRS, TASK, judge
from mpicomp import Marsit, PerNode


def verdicts(*, flat: float, nodes: float) -> list[Claim]:
    """Judge runs that lose so many points at every rate."""

    def runs(points: float) -> list[dict[str, Any]]:
        return [{"accuracy": 0.9 + seed / 100 - points / 100} for seed in range(3)]

    points = dict.fromkeys(METHODS, 0.0) | dict.fromkeys(PAIRS, flat) | dict.fromkeys(PAIRS.values(), nodes)
    found: Runs = {(*rate, method): runs(points[method]) for rate in RATES for method in METHODS}
    return judge(found, PAIRS)


def test_half_of_the_loss_is_the_most() -> None:
    assert {claim.holds for claim in verdicts(flat=0.8, nodes=0.3)} == {True}
    assert {claim.holds for claim in verdicts(flat=0.8, nodes=0.5)} == {False}
    claims = verdicts(flat=0.8, nodes=0.3)
    assert len(claims) == len(PAIRS) * (len(RATES) + 1)
    assert claims[0].ours.startswith("-0.30, Marsit among all ranks -0.80; difference +0.5 ± ")


def test_where_nothing_is_lost_there_is_no_verdict() -> None:
    assert {claim.holds for claim in verdicts(flat=-0.1, nodes=0.2)} == {None}


def test_pairs_are_one_method_with_nodes_and_without() -> None:
    for flat, nodes in PAIRS.items():
        assert PerNode(METHODS[flat]) == METHODS[nodes]
        assert isinstance(METHODS[flat], Marsit)
    assert TASK.options[:4] == ("--dataset", "digits", "--batch", "8")  # the global batch of the learning tables, 64
