"""Every method on ranks that are threads equals its one-process simulation to the bit."""

from __future__ import annotations

import pytest

from tests.exact import check_in_threads, of_each_topology
from tests.trials import TRIALS


@pytest.mark.parametrize("name", TRIALS)
def test_results_and_states_are_those_of_one_process(name: str) -> None:
    check_in_threads(3, TRIALS[name](3))


@pytest.mark.parametrize("ranks", [1, 4, 5, 7])
@pytest.mark.parametrize("name", TRIALS)
def test_plans_of_other_numbers_of_ranks(name: str, ranks: int) -> None:
    check_in_threads(ranks, of_each_topology(TRIALS[name](ranks)))


@pytest.mark.parametrize("name", ["marsit", "relay"])
def test_sixteen_ranks_equal_one_process_too(name: str) -> None:
    check_in_threads(16, of_each_topology(TRIALS[name](16)))
