"""Tags of aggregators: a newcomer makes its aggregators alone, and takes the tags that the members have."""

from __future__ import annotations

import mpicomp
from collectives import Communicator
from mpicomp.algorithms import ALGORITHMS

N = 60_000  # elements whose signs Marsit gathers on few ranks and merges on four


def test_as_many_tags_are_taken_on_any_number_of_ranks() -> None:
    def count(comm: Communicator) -> list[int]:
        taken = []
        for name in sorted(ALGORITHMS):
            before = comm.last_tag
            mpicomp.algorithm(name).start(comm, N)
            taken.append(comm.last_tag - before)
        return taken

    alone, together = (mpicomp.run_local(ranks, count)[0] for ranks in (1, 4))
    assert dict(zip(sorted(ALGORITHMS), alone, strict=True)) == dict(zip(sorted(ALGORITHMS), together, strict=True))
