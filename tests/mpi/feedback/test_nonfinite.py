"""NaN and infinity on some ranks: every rank's error names those ranks, no state has changed, and the run goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, NonFiniteGradient
from mpicomp import Marsit
from tests.exact import ONE_BLOCK, gradient
from tests.methods import METHODS, must_be_restored
from tests.mpi.lanes import TIMEOUT_S, few_ranks, same_everywhere, three_ranks, up_to_four_ranks

N = 5003
# One form of each kind of traffic: sums, signs, counts, codes, codes of both ways, matrices, and shared elements.
EACH_TRAFFIC = (
    *("dense", "cascading", "marsit", "marsit, two winners", "majority", "ssdm, momentum", "qsgd, entropy-coded"),
    *("relay", "double-squeeze", "local top-k", "power-sgd", "scalecom", "sparse-loco", "auto"),
)
assert set(EACH_TRAFFIC) <= set(METHODS)
# tests/unit/feedback/test_nonfinite.py has the same promises on one rank, for more types and places.
pytestmark = pytest.mark.mpi(min_size=2)


def spoiled(vector: Any, bad: float, position: int) -> Any:
    """Return the vector with one bad number."""
    made = vector.copy()
    made[position] = bad
    return made


@pytest.mark.parametrize(
    ("name", "topology", "way"),
    [
        *(
            pytest.param(name, "auto", "at once", marks=up_to_four_ranks if name in EACH_TRAFFIC else three_ranks)
            for name in METHODS
        ),
        *(pytest.param(name, "ring", "in parts", marks=three_ranks) for name in METHODS),
        *(pytest.param(name, "star", "at once", marks=three_ranks) for name in EACH_TRAFFIC),
    ],
    indirect=["way"],
)
def test_every_rank_is_told_whose_numbers_are_bad_and_goes_on_as_if_they_had_not_been(
    mpi_comm: MPI.Intracomm, topology: str, name: str, way: str
) -> None:
    """ScaleCom has a leader, whose numbers all ranks look at first: it is among the culprits, or not."""
    method = METHODS[name]
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=ONE_BLOCK) as comm:
        tried, untried = (method.start(comm, N, vector_id=7) for _ in range(2))
        bad = ((np.nan, {comm.size - 1}), (np.inf, {1 % comm.size}), (-np.inf, {0, comm.size // 2}), (np.nan, {0}))
        for step, (number, culprits) in enumerate(bad):
            g, before = gradient(comm.rank, step, N), tried.state_dict()
            ranks = sorted(culprits)
            named = "rank" + "s" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks))
            given = spoiled(g, number, (0, 1234, N - 1)[step % 3]) if comm.rank in ranks else g
            with pytest.raises(NonFiniteGradient, match=f"vector 7, step {step}, from {named};") as caught:
                tried.aggregate(given)
            assert caught.value.ranks == tuple(ranks)
            if must_be_restored(method, step):
                with pytest.raises(RuntimeError, match="restore it by load_state_dict"):
                    tried.aggregate(g)
                tried.load_state_dict(before)
            np.testing.assert_equal(tried.state_dict(), before)
            result = tried.aggregate(g)
            assert same_everywhere(comm, result)
            np.testing.assert_array_equal(result, untried.aggregate(g))


@few_ranks
@pytest.mark.parametrize("residual", ["own", "paper"])
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("comm", ["auto", "ring"], indirect=True)
def test_skipping_leaves_residuals_alone_on_every_rank(comm: Communicator, residual: Any, every: int | None) -> None:
    aggregator = Marsit(every, residual=residual, nonfinite="skip").start(comm, N)
    for step in range(4):
        g = gradient(comm.rank, step, N)
        aggregator.aggregate(g)
        before = aggregator.state_dict()
        assert not aggregator.aggregate(spoiled(g, np.nan, 7) if comm.rank == comm.size - 1 else g).any()
        assert aggregator.feedback.skipped == step + 1
        np.testing.assert_equal(aggregator.state_dict(), before | {"step": before["step"] + 1})
