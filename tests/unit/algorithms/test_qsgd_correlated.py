"""Correlated rounding: each rank stays unbiased, and the errors of ranks with equal vectors cancel."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import QSGD, SSDM, Communicator, TernGrad, run_local
from mpicomp.kernels.streams import Stream, shared_source

N, STEPS = 2000, 20
METHODS: dict[str, Any] = {
    "qsgd": lambda correlated: QSGD(correlated=correlated),
    "qsgd, entropy": lambda correlated: QSGD(coding="entropy", correlated=correlated),
    "terngrad": lambda correlated: TernGrad(clip=None, correlated=correlated),
    "ssdm": lambda correlated: SSDM(scale="norm", correlated=correlated),
}


def vector(rank: int, alike: bool) -> NDArray[np.float32]:
    return np.random.default_rng(0 if alike else rank).standard_normal(N).astype(np.float32)


def means(method: Any, ranks: int, alike: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the results of all steps, and the exact mean."""

    def work(comm: Communicator) -> Any:
        aggregator, given = method.start(comm, N), vector(comm.rank, alike)
        return [aggregator.aggregate(given).astype(np.float64) for _ in range(STEPS)]

    exact = np.mean([vector(rank, alike) for rank in range(ranks)], axis=0, dtype=np.float64)
    return np.array(run_local(ranks, work, "ring")[0]), exact


def variance(name: str, correlated: bool, ranks: int, alike: bool) -> float:
    found, exact = means(METHODS[name](correlated), ranks, alike)
    return float(np.mean((found - exact) ** 2))


@pytest.mark.parametrize(("name", "ranks"), [*product(METHODS, (2, 4, 8))])
def test_variance_of_the_mean_falls_for_like_vectors_and_hardly_rises_for_others(name: str, ranks: int) -> None:
    for alike, most in ((True, 1.3 / ranks), (False, 1.05)):
        ratio = variance(name, True, ranks, alike) / variance(name, False, ranks, alike)
        assert ratio < most, (alike, ratio)


@pytest.mark.parametrize("name", METHODS)
def test_each_rank_stays_unbiased(name: str) -> None:
    """The mean of many steps tends to the vector, on one rank among others whose vectors are zero."""

    def work(comm: Communicator) -> Any:
        aggregator = METHODS[name](True).start(comm, N)
        given = vector(0, True) if comm.rank == 1 else np.zeros(N, np.float32)
        return sum(aggregator.aggregate(given).astype(np.float64) for _ in range(200)) / 200

    found, exact = run_local(4, work, "ring")[0], vector(0, True) / 4
    spread = np.sqrt(variance(name, False, 4, True) / 200)
    # the mean of the deviations, over elements, of which each has about twice this deviation at most
    assert abs(np.mean((found - exact) * np.sign(exact))) < 8 * spread / np.sqrt(N)


def test_one_rank_draws_as_without_correlation() -> None:
    for name in ("qsgd", "ssdm"):
        found = [means(METHODS[name](correlated), 1, True)[0] for correlated in (False, True)]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000])
def test_words_of_the_ranks_spread_evenly_in_an_order_that_changes(ranks: int) -> None:
    stream = Stream(1, 2, "code")
    orders = []
    for step in range(20):
        sources = [int(shared_source(stream, step, rank, ranks)) for rank in range(ranks)]
        assert {source & 0xFFFFFFFF for source in sources} == {0}
        shifts = [source >> 32 for source in sources]
        assert sorted(shifts) == [2**32 * place // ranks for place in range(ranks)]
        orders.append(shifts)
    assert ranks < 3 or len({tuple(order) for order in orders}) > 1
