"""The merged bit is the sign of one uniformly random rank, element by element and step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, HalvingDoubling, Torus, Tree
from collectives.schedules.plan import Topology
from mpicomp import Marsit
from mpicomp.aggregator.base import Aggregator
from tests.mpi.lanes import TIMEOUT_S, every_size, same_everywhere, topologies
from tests.reference.statistics import assert_binomial, assert_chi_square

N = 16 * 4096
# Distances of elements: neighbours, in one word, in the next word, in the next groups, in the next chunks.
LAGS = (1, 2, 4, 8, 31, 32, 64, 128, 512, 2048, 4096, N // 8)
STATELESS = Marsit(full_precision_every=None, global_step=1.0, compensation=False)

Vector = NDArray[Any]


def positive(aggregator: Aggregator, step: int, signs: Vector) -> NDArray[np.bool_]:
    """The merged bits of a step; taken again, a step draws the same words."""
    aggregator.load_state_dict(aggregator.state_dict() | {"step": step})
    result = aggregator.aggregate(signs.astype(np.float32))
    assert (np.abs(result) == 1).all()
    return result > 0


def winners(comm: Communicator, aggregator: Aggregator, step: int) -> NDArray[np.int64]:
    """Whose sign each element got: each rank in turn is the only one with +1."""
    votes = [positive(aggregator, step, np.full(aggregator.n, 1 if comm.rank == k else -1)) for k in range(comm.size)]
    assert (np.sum(votes, axis=0) == 1).all(), "every element has the sign of exactly one rank"
    return np.argmax(votes, axis=0)


def assert_independent(one: Vector, other: Vector, size: int, what: str) -> None:
    """All pairs of winners are equally frequent."""
    pairs = np.bincount(one * size + other, minlength=size**2)
    assert_chi_square(pairs, np.full(size**2, one.size / size**2), what)


gathered_or_planned = pytest.mark.parametrize("gathered", [True, False], ids=["auto", "plans"])


def ways(size: int, gathered: bool) -> list[tuple[Topology | str, int]]:
    """Return topologies with lengths: under "auto" vectors must be short to be gathered."""
    return [("auto", 16_384)] if gathered else [(topology, N) for topology in topologies(size)]


@gathered_or_planned
@every_size
@pytest.mark.mpi(min_size=2)
def test_every_rank_wins_with_equal_chance_independently(mpi_comm: MPI.Intracomm, gathered: bool) -> None:
    size = mpi_comm.size
    tried, found = ways(size, gathered), []
    for topology, n in tried:
        with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
            aggregator = STATELESS.start(comm, n)
            found.append([winners(comm, aggregator, step) for step in (0, 1)])
    if mpi_comm.rank:  # all have the same: one works it out
        return
    for (topology, n), (first, second) in zip(tried, found, strict=True):
        for won in (first, second):
            assert_binomial(np.bincount(won, minlength=size), n, 1 / size, f"{topology}: elements won by rank")
        for part in np.split(first, 8):  # chunks are owned by different ranks
            assert_binomial(np.bincount(part, minlength=size), n // 8, 1 / size, f"{topology}: of a part, won by rank")
        for lag in LAGS:
            if lag < n // 2:
                assert_independent(first[:-lag], first[lag:], size, f"{topology}: elements {lag} apart")
        assert_independent(first, second, size, f"{topology}: successive steps")


@gathered_or_planned
@every_size
@pytest.mark.mpi(min_size=2)
def test_whatever_the_signs_the_same_rank_wins(mpi_comm: MPI.Intracomm, gathered: bool) -> None:
    size, found = mpi_comm.size, []
    tried = ways(size, gathered)
    for topology, n in tried:
        every = np.random.default_rng(size).choice([-1, 1], (size, n))
        with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
            aggregator = STATELESS.start(comm, n)
            won = winners(comm, aggregator, 3)
            bits = positive(aggregator, 3, every[comm.rank])
            assert same_everywhere(comm, bits)
        assert (bits == (every[won, np.arange(n)] > 0)).all(), topology
        found.append((every, bits))
    if mpi_comm.rank:
        return
    for (topology, _), (every, bits) in zip(tried, found, strict=True):
        voters = (every > 0).sum(axis=0)
        assert not bits[voters == 0].any(), f"{topology}: unanimous bits never flip"
        assert bits[voters == size].all(), f"{topology}: unanimous bits never flip"
        for k in range(1, size):
            of_k = bits[voters == k]
            assert_binomial(of_k.sum(), of_k.size, k / size, f"{topology}: {k} of {size} ranks vote +1, count")


@every_size
@pytest.mark.mpi(min_size=2)
def test_seeds_and_vectors_draw_apart(comm: Communicator) -> None:
    runs = [
        STATELESS.start(comm, N),
        STATELESS.start(comm, N, vector_id=1),
        Marsit(full_precision_every=None, global_step=1.0, compensation=False, seed=1).start(comm, N),
    ]
    won = [winners(comm, aggregator, 0) for aggregator in runs]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert_independent(won[one], won[other], comm.size, f"runs {one} and {other}")


@pytest.mark.parametrize("mpi_comm", [4, 8], indirect=True)
@pytest.mark.parametrize("topology", [Torus(2, None), Tree(), HalvingDoubling()], ids=str)
def test_merging_an_element_again_draws_new_words(
    mpi_comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, int, int]] = []
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=512) as comm:
        aggregator = STATELESS.start(comm, N)
        payload = aggregator.reducer.payload
        draw: Callable[..., None] = payload._draw

        def recorded(first: int, step: int, source: Any, *rest: Any) -> None:
            drawn.append((first, step, int(source)))
            draw(first, step, source, *rest)

        monkeypatch.setattr(payload, "_draw", recorded)
        for _ in range(2):
            aggregator.aggregate(np.ones(N, np.float32))
    again = Counter((element, step) for element, step, _ in drawn)
    assert mpi_comm.allreduce(max(again.values(), default=0), MPI.MAX) > 1, "no rank merged an element twice"
    assert mpi_comm.allreduce(len(drawn) - len(set(drawn))) == 0, "the same words were drawn twice"
