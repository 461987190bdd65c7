"""Dense in 16 bits: bytes on the wire, and errors for numbers that float16 does not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, NonFiniteGradient
from collectives.consistency.recursive_doubling import rounds_of
from mpicomp import Dense
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S

every_wire = pytest.mark.parametrize("wire", ["float16", "bfloat16"])


@every_wire
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_two_bytes_an_element_travel_each_way(mpi_comm: MPI.Intracomm, topology: str, dtype: str, wire: Any) -> None:
    n, size, rank = 64_000, mpi_comm.size, mpi_comm.rank
    with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
        aggregator = Dense(wire=wire).start(comm, n, dtype=dtype)
        aggregator.aggregate(gradient(rank, 0, n, dtype))
        # besides, a flag for each other rank, and the words of the check that all make the same call
        besides = 8 * (size - 1) + (8 * sum(one.sends for one in rounds_of(rank, size)) if size > 1 else 0)
        sent = mpi_comm.allreduce(aggregator.traffic.last.bytes_sent - besides)
    assert sent == 2 * 2 * n * (size - 1)


@pytest.mark.parametrize("comm", ["auto", "ring", "star"], indirect=True)
def test_all_ranks_are_told_whose_numbers_float16_does_not_hold_and_what_to_do(comm: Communicator) -> None:
    n, last = 70_000, comm.size - 1
    half, brain = (Dense(wire=wire).start(comm, n) for wire in ("float16", "bfloat16"))
    vector = np.ones(n, np.float32)
    if comm.rank == last:
        vector[n - 3] = 65520  # the nearest of 16 bits would be infinity
    told = (
        rf"^rank {comm.rank} of {comm.size}: numbers in vector 0, step 0, from rank {last}, are beyond the range of "
        r"float16, which ends at 65504; pass wire='bfloat16', or scale the gradients down, as torch\.amp\.GradScaler"
    )
    with pytest.raises(NonFiniteGradient, match=told) as caught:
        half.aggregate(vector)
    assert caught.value.ranks == ()
    assert np.isfinite(brain.aggregate(vector)).all()
    if comm.rank == 0:
        vector[0] = np.nan  # reported before numbers that are too large
    with pytest.raises(NonFiniteGradient, match="NaN or infinity in vector 0, step 0, from rank 0;") as caught:
        half.aggregate(vector)
    assert caught.value.ranks == (0,)
    assert half.step == 0
    vector = np.full(n, 65519, np.float32)
    assert (half.aggregate(vector) == 65504).all()


@every_wire
def test_nothing_is_kept(comm: Communicator, wire: Any) -> None:
    aggregator = Dense(wire=wire).start(comm, 100)
    vector = np.full(100, 1 + 2.0**-13, np.float32)
    assert all((aggregator.aggregate(vector) == 1).all() for _ in range(3))
    assert aggregator.residual is None
    assert aggregator.state_dict() == {"method": "Dense", "n": 100, "step": 3}
