"""Tests that `every_size` marks, on numbers of ranks that have no lane: ranks are threads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mpi.aggregator import test_aggregator_begin
from tests.mpi.collectives.communicator import test_exchanges_of_numbers
from tests.mpi.collectives.consistency import test_recursive_doubling
from tests.mpi.collectives.dense import test_allreduce, test_dense_gather
from tests.mpi.reducers import test_shared_selection, test_sign_merge
from tests.ranks_as_threads import COUNTS, Case, cases

CASES = [
    *cases(test_aggregator_begin, test_exchanges_of_numbers, test_recursive_doubling, test_allreduce),
    *cases(test_dense_gather, test_shared_selection, test_sign_merge),
]


def test_every_module_with_such_tests_is_here() -> None:
    folder = Path(__file__).parents[4] / "tests" / "mpi"
    marked = {path for path in folder.rglob("test_*.py") if "every_size" in path.read_text()}
    assert marked == {Path(str(sys.modules[case.function.__module__].__file__)) for case in CASES}


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        pytest.param(ranks, case, id=f"{ranks}-{case.name}")
        for ranks in COUNTS
        for case in CASES
        if ranks >= case.least_ranks
    ],
)
def test_a_promise_holds_on_a_number_of_ranks_without_a_lane(
    ranks: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.run(ranks, monkeypatch)
