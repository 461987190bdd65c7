"""Results, states and traffic over MPI equal the recorded ones to the bit; recorded states load and go on.

A part of the record in `tests/fixtures`; ``make fixtures`` compares with all of it. Other numbers of ranks are those of
threads, in `tests/unit/algorithms/test_algorithms_fixtures.py`.
"""

from __future__ import annotations

import pytest
from mpi4py import MPI

from mpicomp import ALGORITHMS
from tests.fixtures import record
from tests.fixtures.cases import STATE_LENGTH, STATE_RANKS, STATES, Case, cases
from tests.mpi.lanes import three_ranks

# MPI's own dense sums are left out: their bits are the library's.
PLACES = ("ring/float32", "auto/float64")
METHODS = ("allreduce", *ALGORITHMS)
OPTIONS = (
    "marsit(full_precision_every=3, residual=paper)/ring/float32",
    "marsit(full_precision_every=3) segmented/ring/float32",
    "relay(levels=3, bucket=320) segmented/ring/float32",
    "ssdm(momentum=0.9, scale=norm, coding=elias)/ring/float32",
    "ef-signsgd(bucket=1000) segmented/ring/float32",
    "qsgd(norm=l2, coding=entropy)/ring/float32",
    "double-squeeze(compressor=quantize:coding=entropy,norm=l2,bucket=100)/ring/float32",
    "scalecom(rate=10, beta=0.3)/ring/float32",
)


def compared(mpi_comm: MPI.Intracomm, chosen: list[Case]) -> list[str]:
    """Return the differences from the record, in sentences."""
    recorded = record.read(mpi_comm.size)
    return [
        sentence
        for case in chosen
        for sentence in record.compare(
            case.name, case.lengths, record.run(mpi_comm, case), recorded.get(case.name)
        ).values()
    ]


@three_ranks
@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_what_it_gave_before(mpi_comm: MPI.Intracomm, method: str) -> None:
    names = {f"{method}/{place}" for place in PLACES}
    chosen = [case for case in cases(mpi_comm.size) if case.name in names]
    assert len(chosen) == len(names)
    assert compared(mpi_comm, chosen) == []


@three_ranks
def test_options_give_what_they_gave_before(mpi_comm: MPI.Intracomm) -> None:
    chosen = [case for case in cases(mpi_comm.size) if case.name in OPTIONS]
    assert len(chosen) == len(OPTIONS)
    assert compared(mpi_comm, chosen) == []


@pytest.mark.mpi(max_size=STATE_RANKS)
@pytest.mark.parametrize("mpi_comm", [STATE_RANKS], indirect=True)
def test_states_from_before_are_gone_on_from(mpi_comm: MPI.Intracomm) -> None:
    recorded = record.read("states")
    assert len(recorded) == len(STATES)
    for number in range(len(STATES)):
        name = record.state_name(number)
        assert record.compare(name, (STATE_LENGTH,), record.run_state(mpi_comm, number), recorded[name]) == {}
