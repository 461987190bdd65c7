"""`PerNode(local="gloo")` on processes: the bits of messages, and the groups of the program are left alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from mpicomp import Dense, EFSignSGD, LocalTopK, Marsit, NonFiniteGradient, PerNode
from mpicomp.nodes import torch_group
from tests.mpi.lanes import TIMEOUT_S, same_everywhere, up_to_four_ranks

pytestmark = [up_to_four_ranks, pytest.mark.mpi(min_size=2), pytest.mark.communicator(ranks_per_node=2)]

N, STEPS = 70_001, 3


def vector(rank: int, step: int, dtype: str = "float32") -> Any:
    values = np.random.default_rng((rank, step)).standard_normal(N).astype(dtype)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("method", "dtype"),
    [(Marsit(2), "float32"), (EFSignSGD(), "float16"), (LocalTopK(50), "float64"), (Dense(), "float32")],
    ids=str,
)
def test_bits_are_those_of_messages(comm: Communicator, method: Any, dtype: str, background: bool) -> None:
    """Several calls are in flight, which the ranks wait for in different orders."""
    found, expected = (
        [PerNode(method, local).start(comm, N, dtype=dtype, vector_id=number) for number in range(2)]
        for local in ("gloo", "ring")
    )
    if background:
        comm.start_progress_thread()
    for step in range(STEPS):
        x = vector(comm.rank, step, dtype)
        others = [one.aggregate(x) for one in expected]
        handles = [one.begin(x) for one in found]
        order = (0, 1) if comm.rank % 2 else (1, 0)
        results = {number: handles[number].wait() for number in order}
        for number, other in enumerate(others):
            np.testing.assert_array_equal(results[number], other)
            assert same_everywhere(comm, other)


def test_nan_is_an_error_on_all_ranks_and_nothing_is_lost(comm: Communicator) -> None:
    aggregator, other = (PerNode(LocalTopK(50), local).start(comm, N) for local in ("gloo", "ring"))
    bad = np.array(vector(comm.rank, 0))
    bad[0] = np.nan if comm.rank == 1 else 1
    for _ in range(2):
        with pytest.raises(NonFiniteGradient, match="from rank 1;"):
            aggregator.aggregate(bad)
    np.testing.assert_array_equal(aggregator.aggregate(vector(comm.rank, 1)), other.aggregate(vector(comm.rank, 1)))


def test_the_program_s_own_groups_are_left_alone(comm: Communicator, folder: Any) -> None:
    from torch import distributed, ones

    aggregator = PerNode(Dense(), "gloo").start(comm, N)
    assert not distributed.is_initialized()
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    try:
        result = aggregator.aggregate(vector(comm.rank, 0))
        total = ones(1)
        distributed.all_reduce(total)
    finally:
        distributed.destroy_process_group()
    assert int(total) == comm.size
    np.testing.assert_array_equal(result, PerNode(Dense(), "ring").start(comm, N).aggregate(vector(comm.rank, 0)))


def test_a_group_that_cannot_be_made_is_an_error_on_all_ranks(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = torch_group.make_backend

    def fail(kind: str, *about: Any) -> Any:
        if comm.rank == 0:
            raise RuntimeError("no route to host")
        return make(kind, *about)

    monkeypatch.setattr(torch_group, "make_backend", fail)
    comm.timeout = comm.nodes.local.timeout = 3
    with pytest.raises(ValueError, match="local='gloo' cannot be used: on rank 0, RuntimeError: no route to host"):
        PerNode(Dense(), "gloo").start(comm, N)
    monkeypatch.undo()
    comm.timeout = comm.nodes.local.timeout = 20
    assert PerNode(Dense(), "gloo").start(comm, N).aggregate(vector(0, 0))[0] == vector(0, 0)[0]


def test_pytorch_without_the_backend_on_one_rank_is_an_error_on_all(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == 1:
        monkeypatch.setitem(torch_group.BACKENDS, "gloo", "ProcessGroupOther")
    with pytest.raises(ValueError, match="on rank 1, this build of PyTorch has no ProcessGroupOther; or pass local="):
        PerNode(Dense(), "gloo").start(comm, N)
    monkeypatch.undo()
    assert PerNode(Dense(), "gloo").start(comm, N).aggregate(vector(0, 0))[0] == vector(0, 0)[0]


def test_a_folder_that_is_missing_is_an_error_on_all_ranks(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group.tempfile, "tempdir", "/nowhere")
    with pytest.raises(ValueError, match="on rank 0, OSError: the ranks of this node have no folder to share"):
        PerNode(Dense(), "gloo").start(comm, N)


def test_the_folder_of_a_group_is_there_until_all_ranks_have_left_it(
    mpi_comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, was_there, make, close = list[Path](), list[bool](), torch_group._shared_folder, torch_group.TorchGroup.close

    def shared_folder(local: Communicator) -> Any:
        folder, path = make(local)
        paths.append(Path(path))
        return folder, path

    def close_late(group: torch_group.TorchGroup) -> None:
        time.sleep(0.3 * (mpi_comm.rank % 2))
        was_there.append(paths[0].exists())
        close(group)

    monkeypatch.setattr(torch_group, "_shared_folder", shared_folder)
    monkeypatch.setattr(torch_group.TorchGroup, "close", close_late)
    with Communicator(mpi_comm, ranks_per_node=2, timeout=TIMEOUT_S) as comm:
        PerNode(Dense(), "gloo").start(comm, 10).aggregate(np.ones(10, np.float32))
    mpi_comm.barrier()
    assert was_there == [True]
    assert not paths[0].exists()
