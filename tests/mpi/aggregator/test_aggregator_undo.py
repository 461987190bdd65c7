"""A step that is taken back leaves no trace in later steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient
from mpicomp import (
    QSGD,
    SSDM,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    MajorityVote,
    Marsit,
    OneBitSGD,
    TopKSGD,
)
from tests.exact import gradient
from tests.mpi.lanes import three_ranks

N = 3000


@pytest.mark.parametrize("method", [Marsit(transactional=True), QSGD(), TopKSGD(rate=4)], ids=str)
def test_a_step_that_one_rank_refuses_leaves_nothing_to_take_back_on_any(comm: Communicator, method: Any) -> None:
    aggregator = method.start(comm, 64)
    aggregator.aggregate(gradient(comm.rank, 0, 64))
    with pytest.raises(ValueError if comm.rank == 0 else CollectiveMismatch, match="65 elements"):
        aggregator.aggregate(gradient(comm.rank, 1, 65 if comm.rank == 0 else 64))
    assert not aggregator.can_undo


@three_ranks
@pytest.mark.parametrize(
    "method",
    [
        Dense(),
        Dense(wire="float16"),
        DoubleSqueeze(),
        DoubleSqueeze("quantize:levels=7,bucket=384"),
        OneBitSGD(),
        EFSignSGD(bucket=512),
        SSDM(momentum=0.9, scale="norm"),
        MajorityVote(),
        Marsit(full_precision_every=3, transactional=True),
        Marsit(full_precision_every=None, residual="paper", gamma="auto", transactional=True),
    ],
    ids=str,
)
def test_a_step_taken_back_leaves_no_trace(comm: Communicator, method: Any) -> None:
    straight, back = method.start(comm, N), method.start(comm, N)
    for step in range(4):
        vector = gradient(comm.rank, step, N)
        back.aggregate(gradient(comm.rank, 100 + step, N))
        back.undo()
        assert (back.aggregate(vector) == straight.aggregate(vector)).all()
    for key, value in straight.state_dict().items():
        assert np.array_equal(back.state_dict()[key], value)
    assert back.traffic.total.bytes_sent == 2 * straight.traffic.total.bytes_sent


def test_what_cannot_be_taken_back_is_told(comm: Communicator) -> None:
    squeeze, marsit = DoubleSqueeze().start(comm, N), Marsit().start(comm, N)
    vector = gradient(comm.rank, 0, N)
    for aggregator in (squeeze, marsit):
        with pytest.raises(RuntimeError, match="no step that can be taken back"):
            aggregator.undo()
    for aggregator in (squeeze, marsit):
        aggregator.aggregate(vector)
    with pytest.raises(RuntimeError, match="no step that can be taken back"):
        marsit.undo()
    state = squeeze.state_dict()
    call = squeeze.begin(vector)
    with pytest.raises(RuntimeError, match="no step that can be taken back"):
        squeeze.undo()
    call.wait()
    squeeze.undo()
    squeeze.aggregate(vector)
    with pytest.raises(NonFiniteGradient):
        squeeze.aggregate(np.full(N, np.nan, np.float32))
    with pytest.raises(RuntimeError, match="no step that can be taken back"):
        squeeze.undo()
    squeeze.load_state_dict(state)
    with pytest.raises(RuntimeError, match="no step that can be taken back"):
        squeeze.undo()
