"""States that must not be gone on from, or not on one rank alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient
from mpicomp import Dense, Marsit
from tests.mpi.lanes import TIMEOUT_S

N = 200


def test_a_full_precision_round_that_overflows_is_told(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        aggregator = Marsit(full_precision_every=2).start(comm, N)
        full = np.full(N, 3e38, np.float32)
        if comm.size == 1:
            assert (aggregator.aggregate(full) == full).all()
            return
        with pytest.raises(NonFiniteGradient, match=r"no rank \(the sum overflowed\)"):
            aggregator.aggregate(full)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("topology", ["auto", "ring"])
def test_dense_names_the_rank_with_nan(mpi_comm: MPI.Intracomm, topology: str, dtype: str) -> None:
    with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
        culprit = comm.size - 1
        x = np.full(N, np.nan if comm.rank == culprit else 1, dtype)
        with pytest.raises(NonFiniteGradient) as caught:
            Dense().start(comm, N, dtype=dtype).aggregate(x)
        assert caught.value.ranks == (culprit,)


@pytest.mark.mpi(min_size=2)
def test_a_state_that_one_rank_alone_restores_is_a_mismatch(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        aggregator = Marsit(None).start(comm, N)
        aggregator.aggregate(np.ones(N, np.float32))
        state = aggregator.state_dict()
        if comm.rank == 0:
            state["magnitudes"] = 10 * state["magnitudes"]
        aggregator.load_state_dict(state)
        with pytest.raises(CollectiveMismatch, match=r"restored with gamma 4\.0 and magnitudes"):
            aggregator.aggregate(np.ones(N, np.float32))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("tensor_lengths", [(100, 64), (64,) * 10])
def test_segments_that_differ_are_a_mismatch(mpi_comm: MPI.Intracomm, tensor_lengths: tuple[int, ...]) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        n = sum(-(-length // 64) * 64 for length in tensor_lengths)
        mine = tensor_lengths if comm.rank else (n,)
        aggregator = Marsit(None).start(comm, n, tensor_lengths=mine)
        with pytest.raises(CollectiveMismatch, match=f"in {len(tensor_lengths)} tensors"):
            aggregator.aggregate(np.ones(n, np.float32))


def test_a_spoiled_state_is_not_saved(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        aggregator = Marsit(None).start(comm, N)
        with pytest.raises(NonFiniteGradient):
            aggregator.aggregate(np.full(N, np.nan, np.float32))
        with pytest.raises(RuntimeError, match="its residual is spoiled"):
            aggregator.state_dict()


def test_a_residual_with_nan_is_not_loaded(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        aggregator = Marsit(None).start(comm, N)
        state: dict[str, Any] = aggregator.state_dict()
        state["residual"][3] = np.nan
        with pytest.raises(ValueError, match="residual holds NaN or infinity"):
            aggregator.load_state_dict(state)


def test_a_chosen_gamma_outlives_a_restored_one(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        state = Marsit(None, gamma=4).start(comm, N).state_dict()
        chosen = Marsit(None, gamma=1).start(comm, N)
        chosen.load_state_dict(state)
        assert chosen.gamma == 1
