"""PerNode over MPI: the bits of threads, calls in flight, optimizers, and ranks that die or differ."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from mpicomp import Dense, EFSignSGD, LocalTopK, Marsit, PerNode, run_local
from mpicomp.torch import DistributedOptimizer, OneBitAdam, redistribute_states, require_same
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S
from tests.mpi.torch.training import make_model, parameters_of, train, wrap

N = 150_000


def aggregated(comm: Communicator, method: Any, steps: int = 3) -> list[Any]:
    aggregator = method.start(comm, N)
    return [aggregator.aggregate(gradient(comm.rank, step, N)) for step in range(steps)]


@pytest.mark.parametrize(
    ("method", "local", "per"),
    [
        *((Dense(), local, per) for local in ("shared", "ring") for per in (1, 2, 3)),
        *((LocalTopK(50), "shared", 2), (LocalTopK(50), "ring", 3)),
        *((Marsit(2), "ring", 2), (Marsit(2), "shared", 3)),
    ],
    ids=str,
)
def test_processes_have_the_bits_of_threads(mpi_comm: MPI.Intracomm, method: Any, local: Any, per: int) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, ranks_per_node=per) as comm:
        found = aggregated(comm, PerNode(method, local))
    expected = run_local(mpi_comm.size, lambda comm: aggregated(comm, PerNode(method)), "ring", ranks_per_node=per)
    np.testing.assert_array_equal(found, expected[mpi_comm.rank])


def test_the_ranks_of_a_host_are_a_node(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        assert comm.nodes.sizes == (comm.size,)
        assert comm.nodes.local.size == comm.size
        assert comm.nodes.across.size == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("drives", [False, True], ids=["polled", "thread"])
def test_calls_in_flight_have_the_bits_of_calls_one_after_the_other(mpi_comm: MPI.Intracomm, drives: bool) -> None:
    method = PerNode(EFSignSGD())
    with Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=2) as comm:
        if drives:
            comm.start_progress_thread()
        aggregators = [method.start(comm, N + 5 * k, vector_id=k) for k in range(4)]
        expected = [method.start(comm, N + 5 * k, vector_id=k) for k in range(4)]
        for step in range(3):
            vectors = [gradient(comm.rank, step, one.n) for one in aggregators]
            handles = [one.begin(vector) for one, vector in zip(aggregators, vectors, strict=True)]
            order = range(4) if comm.rank % 2 else reversed(range(4))
            found = {k: handles[k].wait() for k in order}
            for k, one in enumerate(expected):
                np.testing.assert_array_equal(found[k], one.aggregate(vectors[k]))


@pytest.mark.mpi(min_size=2)
def test_no_file_of_shared_memory_is_left(
    mpi_comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are in a folder of this test: beside this lane another one makes and removes its own."""
    monkeypatch.setattr("collectives.arrays.shared_memory.FOLDERS", (folder,))
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        aggregated(comm, PerNode(Dense()), 1)
        comm.barrier()
        assert not any(folder.iterdir())


@pytest.mark.mpi(min_size=2)
def test_nodes_of_different_sizes_on_the_ranks_are_an_error_on_all(mpi_comm: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match="ranks_per_node is 1 on rank 0 and 2 on rank"):
        Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=1 + (mpi_comm.rank == mpi_comm.size - 1))


@pytest.mark.mpi(min_size=2)
def test_other_options_on_a_rank_are_a_mismatch(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=2) as comm:
        method = PerNode(LocalTopK(50 + (comm.rank == 0)))
        aggregator = method.start(comm, N)
        with pytest.raises(CollectiveMismatch, match=r"rate=5|algorithm="):
            aggregator.aggregate(gradient(comm.rank, 0, N))
        comm.barrier()


# Optimizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mode", "overlap"),
    [
        (EFSignSGD(), "gradients", False),
        (EFSignSGD(), "updates", True),
        (Marsit(3), "gradients", True),
        (Marsit(3), "updates", False),
    ],
    ids=str,
)
def test_an_optimizer_trains_one_model_and_resumes(
    mpi_comm: MPI.Intracomm, method: Any, mode: Any, overlap: bool
) -> None:
    def make(comm: Communicator) -> tuple[torch.nn.Module, DistributedOptimizer]:
        model = make_model()
        return model, wrap(model, PerNode(method), comm, synchronize=mode, overlap=overlap)

    with Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=2) as comm:
        model, optimizer = make(comm)
        train(model, optimizer, comm, range(4))
        state, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        train(model, optimizer, comm, range(4, 7))
        require_same(model, comm)
        again, resumed = make(comm)
        again.load_state_dict(weights)
        resumed.check_state_dict(state)
        resumed.load_state_dict(state)
        train(again, resumed, comm, range(4, 7))
        assert torch.equal(parameters_of(model), parameters_of(again))


@pytest.mark.mpi(min_size=3)
def test_optimizer_states_move_to_nodes_of_other_sizes(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=2) as comm:
        model = make_model()
        optimizer = wrap(model, PerNode(LocalTopK(10)), comm)
        train(model, optimizer, comm, range(3))
        states = comm.allgather_object(optimizer.state_dict())
        weights = model.state_dict()
        pending = [np.concatenate([np.asarray(one["residual"]) for one in s["mpicomp"]["aggregators"]]) for s in states]
    with Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=3) as comm:
        moved = redistribute_states(states, comm.size)[comm.rank]
        model = make_model()
        model.load_state_dict(weights)
        optimizer = wrap(model, PerNode(LocalTopK(10)), comm)
        optimizer.load_state_dict(moved)
        train(model, optimizer, comm, range(3, 5))
        require_same(model, comm)
    assert any(one.any() for one in pending)


def test_one_bit_adam_averages_over_nodes(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S, ranks_per_node=2) as comm:
        model = make_model()
        adam = OneBitAdam(model.parameters(), 0.01, per_node="shared", comm=comm, warmup_steps=2)
        train(model, adam, comm, range(5))
        assert adam.frozen
        require_same(model, comm)
