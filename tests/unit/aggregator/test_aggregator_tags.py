"""Tags of aggregators: a newcomer makes its aggregators alone, and takes the tags that the members have."""

from __future__ import annotations

import mpicomp
from collectives import Communicator
from mpicomp.algorithms import ALGORITHMS

N = 60_000  # elements whose signs Marsit gathers on few ranks and merges on four
LONG = 400_000  # elements whose few winners are gathered at once by one rank alone
METHODS = [*((name, {}, N) for name in sorted(ALGORITHMS)), ("marsit", {"winners": 1}, LONG)]


def test_as_many_tags_are_taken_on_any_number_of_ranks() -> None:
    def count(comm: Communicator) -> list[int]:
        taken = []
        for name, options, n in METHODS:
            before = comm.last_tag
            mpicomp.algorithm(name, **options).start(comm, n)
            taken.append(comm.last_tag - before)
        return taken

    alone, together = (mpicomp.run_local(ranks, count)[0] for ranks in (1, 4))
    assert [*zip(METHODS, alone, strict=True)] == [*zip(METHODS, together, strict=True)]
