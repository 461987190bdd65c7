"""One rank makes another call: all ranks raise the same error, and the campaign notices if they do not."""

from __future__ import annotations

import pytest

from apps.chaos import mismatches
from apps.chaos.mismatches import MUTATIONS, Outcome, draw_sequence, outcome

SAME = "CollectiveMismatch: the ranks differ in collective call 3: ranks 0-1: barrier()"


@pytest.mark.parametrize("seed", [101, 103, 104, 105, 120, 128])
def test_all_ranks_raise_the_same_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatches, "PATIENCE_S", 60.0)
    found = outcome(seed, 2 + seed % 3)
    assert not found.problem, found
    assert not found.is_timeout


def test_every_mutation_is_drawn_and_changes_the_calls_of_one_rank() -> None:
    drawn = [draw_sequence(seed, 3) for seed in range(60)]
    assert {name for *_, name in drawn} == {*MUTATIONS}
    assert all(calls != changed and odd < 3 for calls, changed, odd, _ in drawn)


@pytest.mark.parametrize(
    ("errors", "problem"),
    [
        ((SAME, SAME), ""),
        ((SAME, f"CollectiveMismatch: not all ranks have come to call 1: rank 0 left: {SAME.partition(': ')[2]}"), ""),
        ((SAME, SAME.replace("3", "2")), "the ranks raised different errors"),
        ((SAME, "CollectiveTimeout: not all ranks have come"), "the ranks raised different errors"),
        ((SAME, ""), "a rank raised no error"),
        (("CollectiveTimeout: rank 0", "CollectiveTimeout: rank 1"), ""),
    ],
)
def test_errors_that_differ_are_a_fault(errors: tuple[str, ...], problem: str) -> None:
    assert Outcome(0, "another call", errors).problem == problem
