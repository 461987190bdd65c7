"""Sums that overflow on one rank alone are one error on all ranks, which loses nothing."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient
from mpicomp import ECQSGD, QSGD, DoubleSqueeze, Marsit, MemSGD
from tests.mpi.lanes import few_ranks, same_everywhere

pytestmark = few_ranks

N = 700


def outcome(aggregator: Any, vector: NDArray[Any]) -> tuple[Any, str | None]:
    """Return the result, or the error expected on every rank."""
    try:
        return aggregator.aggregate(vector), None
    except NonFiniteGradient as error:
        return None, re.sub(r"^rank \d+ of", "rank ? of", str(error))


def require_told(comm: Communicator, tried: Any, vector: NDArray[Any]) -> None:
    """Check that the step is one error on all ranks which blames no rank's numbers, and has changed no state."""
    before = tried.state_dict()
    _, error = outcome(tried, vector)
    assert error is not None
    assert len(set(comm.mpi_comm.allgather(error))) == 1
    assert "in vector 0, step 0, from no rank (the sum overflowed);" in error
    np.testing.assert_equal(tried.state_dict(), before)


@pytest.mark.parametrize("codec", ["one-bit:bucket=64", "quantize:bucket=64", "top-k:rate=7", "clip:bits=11"])
def test_overflow_at_one_owner_is_told_by_all(comm: Communicator, codec: str) -> None:
    """Sent values and owners' errors are finite; their sum is not, on the owner of the last elements."""
    tried = DoubleSqueeze(codec).start(comm, N)
    pending = np.where(np.arange(N) < N - 8, 0, 3.3e38).astype(np.float32)
    tried.load_state_dict(tried.state_dict() | {"owner_error": pending})
    require_told(comm, tried, np.full(N, 3.3e38 / comm.size, np.float32))  # whose sum is finite
    assert np.isfinite(tried.aggregate(np.full(N, -1e38 / comm.size, np.float32))).all()


def test_a_residual_that_overflows_though_all_that_was_sent_is_finite_is_told_by_all(comm: Communicator) -> None:
    tried = ECQSGD(alpha=1e-3, bucket=64).start(comm, N)
    mine = np.full(N, 3.4e38 if comm.rank == comm.size - 1 else 0, np.float32)
    tried.load_state_dict(tried.state_dict() | {"residual": mine})
    # of an l2 norm most values are far above their share, and the rest is 0: nothing of it is sent
    vector = np.zeros(N, np.float32)
    vector[::64] = 3.3e38
    vector[1::64] = 1e37
    require_told(comm, tried, vector)


@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(piece_bytes=512)
@pytest.mark.parametrize("method", [QSGD(bucket=64), MemSGD("quantize:bucket=64")], ids=str)
def test_a_mean_that_overflows_in_its_first_piece_is_told_by_all(comm: Communicator, method: Any) -> None:
    """The values that each rank sends are finite, and so are all later pieces."""
    vector = np.where(np.arange(5000) < 64, 3.3e38, 1).astype(np.float32)
    require_told(comm, method.start(comm, 5000), vector)


@pytest.mark.communicator(topology="auto")
def test_calls_go_on_after_a_scale_that_overflows_before_anything_is_sent(comm: Communicator) -> None:
    """A step fails before its first messages, which compare the call too: later calls wait for that comparison."""
    aggregator = Marsit(full_precision_every=None).start(comm, 64, dtype="float16")
    failed = 0
    for step in range(24):
        value = 100.0 if step == 0 else 60000.0 if step < 6 else 1.0
        try:
            aggregator.aggregate(np.full(64, value, np.float16))
        except NonFiniteGradient:
            failed += 1
    assert comm.size == 1 or failed
    assert same_everywhere(comm, np.array([failed, aggregator.step]))
