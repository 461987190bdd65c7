"""Short steps whose reports and payloads travel in the messages by which the ranks compare the call."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient
from mpicomp import QSGD, SSDM, Marsit, TernGrad
from tests.mpi.lanes import few_ranks, same_everywhere, same_text_on

pytestmark = [
    few_ranks,
    pytest.mark.mpi(min_size=2),
    pytest.mark.parametrize("comm", ["auto"], indirect=True),
]

N = 1000
MARSIT = Marsit(full_precision_every=None)
# Methods, and how many exchanges of two ranks a warm step takes: that of the announcement, and those of the method.
METHODS: dict[str, tuple[Any, int]] = {
    "marsit": (MARSIT, 1),
    "winners": (Marsit(full_precision_every=None, winners=1), 1),
    "paper": (Marsit(full_precision_every=None, residual="paper"), 1),
    "ssdm": (SSDM(momentum=0.5), 2),
    "terngrad": (TernGrad(), 2),
    "qsgd": (QSGD(), 1),
}


def vector(comm: Communicator, step: int = 0) -> Any:
    return np.random.default_rng(97 * step + comm.rank).standard_normal(N, np.float32)


def state(aggregator: Any) -> dict[str, bytes]:
    return {key: np.asarray(one).tobytes() for key, one in aggregator.state_dict().items()}


@pytest.mark.parametrize("name", METHODS)
def test_a_warm_step_of_two_ranks_takes_few_messages(comm: Communicator, name: str) -> None:
    method, messages = METHODS[name]
    aggregator = method.start(comm, N)
    for step in range(3):
        assert same_everywhere(comm, aggregator.aggregate(vector(comm, step)))
    if comm.size == 2:
        assert aggregator.traffic.last.messages == messages


@pytest.mark.parametrize("name", METHODS)
def test_a_mismatch_discards_what_travelled_with_the_comparison(comm: Communicator, name: str) -> None:
    aggregator, twin = (METHODS[name][0].start(comm, N) for _ in range(2))
    for step in range(2):
        aggregator.aggregate(vector(comm, step))
        twin.aggregate(vector(comm, step))
    before = state(aggregator)
    call = partial(aggregator.aggregate, vector(comm, 2)) if comm.rank else partial(comm.allreduce, np.ones(3))
    with pytest.raises(CollectiveMismatch, match="differ in collective call") as caught:
        call()
    same_text_on(comm, caught.value, range(comm.size))
    assert state(aggregator) == before
    assert np.array_equal(aggregator.aggregate(vector(comm, 3)), twin.aggregate(vector(comm, 3)))


def test_two_steps_of_one_aggregator_differ(comm: Communicator) -> None:
    aggregator = MARSIT.start(comm, N)
    if comm.rank == comm.size - 1:
        aggregator.load_state_dict(aggregator.state_dict() | {"step": 8})
    with pytest.raises(CollectiveMismatch, match="step 8"):
        aggregator.aggregate(vector(comm))


def test_a_mismatch_does_not_spoil_the_residual_but_nan_does(comm: Communicator) -> None:
    aggregator = MARSIT.start(comm, N)
    for step in range(2):
        aggregator.aggregate(vector(comm, step))
    damaged = vector(comm)
    if comm.rank == 1:
        damaged[7] = np.nan
    with pytest.raises(NonFiniteGradient):
        aggregator.aggregate(damaged)
    with pytest.raises(RuntimeError, match="spoiled"):
        aggregator.state_dict()


def test_a_communicator_that_does_not_compare_sends_no_comparison(comm: Communicator) -> None:
    with Communicator(comm.mpi_comm, verify=False) as comm:
        aggregator = MARSIT.start(comm, N)
        for step in range(3):
            assert same_everywhere(comm, aggregator.aggregate(vector(comm, step)))
        assert aggregator.traffic.last.messages == comm.size - 1


def test_sums_that_a_call_carries_travel_in_its_comparison(comm: Communicator) -> None:
    aggregator, sums = MARSIT.start(comm, N), np.zeros(2)
    for step in range(3):
        aggregator.carry(np.array([1.0, comm.rank]), sums)
        aggregator.aggregate(vector(comm, step))
        assert sums[0] == comm.size
