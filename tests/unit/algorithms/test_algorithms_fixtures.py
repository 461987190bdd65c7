"""Results, states and traffic of ranks that are threads equal the recorded ones of processes, to the bit."""

from __future__ import annotations

import pytest

from collectives.threads.run_local import run_local
from mpicomp import ALGORITHMS
from tests.fixtures import record
from tests.fixtures.cases import cases
from tests.ranks_as_threads import exchange_objects

pytest.importorskip("torch")  # which makes the bfloat16 vectors

# By the number of ranks: the lane of three compares the others, in tests/mpi/test_fixtures.py.
PLACES = {
    1: ("ring/float32",),
    2: ("star/float16", "auto/float64"),
    5: ("star/float16", "torus/bfloat16"),
    8: ("ring/float32", "torus/bfloat16"),
}


@pytest.mark.parametrize("ranks", PLACES)
@pytest.mark.parametrize("method", ["allreduce", *ALGORITHMS])
def test_a_method_gives_what_it_gave_before(ranks: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange_objects(ranks, monkeypatch)
    recorded, names = record.read(ranks), {f"{method}/{place}" for place in PLACES[ranks]}
    chosen = [case for case in cases(ranks) if case.name in names]
    assert len(chosen) == len(names)
    for case in chosen:
        entries = run_local(ranks, lambda comm, case=case: record.run(comm.mpi_comm, case))
        for entry in entries:
            assert record.compare(case.name, case.lengths, entry, recorded.get(case.name)) == {}
