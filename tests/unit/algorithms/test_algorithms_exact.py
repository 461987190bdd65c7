"""Every method on ranks that are threads equals its one-process simulation to the bit."""

from __future__ import annotations

import pytest

from tests.exact import check_in_threads
from tests.trials import TRIALS


@pytest.mark.parametrize("name", TRIALS)
def test_results_and_states_are_those_of_one_process(name: str) -> None:
    check_in_threads(3, TRIALS[name](3))  # tests/mpi has the trials of one rank


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_numbers_of_ranks_that_plans_treat_apart(ranks: int) -> None:
    check_in_threads(ranks, [case for case in TRIALS["marsit"](ranks) if case[0].n > 10_000], None)
