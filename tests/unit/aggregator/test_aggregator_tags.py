"""Tags of aggregators: a newcomer makes its aggregators alone, and takes the tags that the members have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpicomp
from collectives import CollectiveMismatch, Communicator
from mpicomp import SSDM, DoubleSqueeze, EFSignSGD, Marsit, ScaleCom
from mpicomp.algorithms import ALGORITHMS
from tests.exact import gradient

N = 60_000  # elements whose signs Marsit gathers on few ranks and merges on four
LONG = 400_000  # elements whose few winners are gathered at once by one rank alone
METHODS = [*((name, {}, N) for name in sorted(ALGORITHMS)), ("marsit", {"winners": 1}, LONG)]


def test_as_many_tags_are_taken_on_any_number_of_ranks() -> None:
    def count(comm: Communicator) -> list[int]:
        taken = []
        for name, options, n in METHODS:
            before = comm.users.last_tag
            mpicomp.algorithm(name, **options).start(comm, n)
            taken.append(comm.users.last_tag - before)
        return taken

    alone, together = (mpicomp.run_local(ranks, count)[0] for ranks in (1, 4))
    assert [*zip(METHODS, alone, strict=True)] == [*zip(METHODS, together, strict=True)]


def test_an_empty_vector_takes_as_many_tags_as_a_long_one() -> None:
    """A rank whose start has failed takes the others' tags by it."""

    def count(comm: Communicator, empty: bool) -> list[int]:
        taken = []
        for name, options, n in METHODS:
            before = comm.users.last_tag
            mpicomp.algorithm(name, **options).start(comm, 0 if empty else n)
            taken.append(comm.users.last_tag - before)
        return taken

    found = mpicomp.run_local(4, lambda comm: [count(comm, empty) for empty in (False, True)])
    assert found[0][0] == found[0][1]


@pytest.mark.parametrize("error", [MemoryError, ValueError])
@pytest.mark.parametrize("method", [Marsit(None), EFSignSGD(), DoubleSqueeze(), ScaleCom(8), SSDM()], ids=str)
def test_all_ranks_can_start_again_after_the_start_of_one_has_failed(
    method: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fails = type(method), [True]
    parts = kind.parts

    def failing(self: Any, comm: Communicator, spec: Any) -> Any:
        made = parts(self, comm, spec)
        if comm.rank == 1 and spec.n and fails[0]:
            raise error("not on this rank")
        return made

    def work(comm: Communicator) -> Any:
        vector = gradient(comm.rank, 0, 1000)
        if not fails[0]:
            return method.start(comm, 1000).aggregate(vector)
        if comm.rank == 1:
            with pytest.raises(error, match=r"^rank 1 of 2, start: .*not on this rank"):
                method.start(comm, 1000)
        else:
            with pytest.raises(CollectiveMismatch, match=r"rank 1 rejects start: .*not on this rank"):
                method.start(comm, 1000).aggregate(vector)
        comm.barrier()
        fails[0] = False
        comm.barrier()
        return method.start(comm, 1000).aggregate(vector)

    monkeypatch.setattr(kind, "parts", failing)
    after = mpicomp.run_local(2, work)
    for found, plain in zip(after, mpicomp.run_local(2, work), strict=True):
        np.testing.assert_array_equal(found, plain)
