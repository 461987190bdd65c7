"""Files of ranks next to a checkpoint: complete sets are restored, and others refused on all ranks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from mpicomp import Communicator, ScaleCom
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.state.rank_files import load_beside, remove_beside, save_beside
from tests.mpi.lanes import few_ranks, two_ranks

pytestmark = few_ranks


def trained(comm: Communicator, steps: int) -> DistributedOptimizer:
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), ScaleCom(rate=4), comm, [("weight", weight)])
    for step in range(steps):
        optimizer.zero_grad()
        (weight * torch.arange(64) * (comm.rank + step + 1)).sum().backward()
        optimizer.step()
    return optimizer


def residual(optimizer: DistributedOptimizer) -> list[float]:
    (aggregator,) = optimizer.aggregators
    assert aggregator.residual is not None
    return [float(one) for one in aggregator.residual]


def test_each_rank_restores_its_own(comm: Communicator, folder: Path) -> None:
    optimizer = trained(comm, 3)
    save_beside(folder / "new" / "last.ckpt", [optimizer], comm)
    other = trained(comm, 1)
    assert load_beside(folder / "new" / "last.ckpt", [other], comm)
    assert residual(other) == residual(optimizer)
    comm.barrier()
    if comm.rank == 0:
        remove_beside(folder / "new" / "last.ckpt")
    comm.barrier()
    assert not load_beside(folder / "new" / "last.ckpt", [other], comm)


@two_ranks
def test_what_was_written_by_other_ranks_is_redistributed(comm: Communicator, folder: Path) -> None:
    with comm.split(comm.rank) as alone:
        optimizer = trained(alone, 2)
        if comm.rank == 0:
            save_beside(folder / "last.ckpt", [optimizer], alone)
    comm.barrier()
    other = trained(comm, 1)
    assert load_beside(folder / "last.ckpt", [other], comm)
    assert other.synchronizations == 2


@two_ranks
def test_an_incomplete_set_is_refused_on_all_ranks(comm: Communicator, folder: Path) -> None:
    optimizer = trained(comm, 1)
    save_beside(folder / "last.ckpt", [optimizer], comm)
    comm.barrier()
    if comm.rank == 1:
        (folder / "last.ckpt.rank1-of-2").unlink()
    comm.barrier()
    with pytest.raises(ValueError, match=r"next to .*last.ckpt the file of rank 1 of 2 is missing"):
        load_beside(folder / "last.ckpt", [optimizer], comm)


@two_ranks
def test_a_damaged_file_is_refused_on_all_ranks(comm: Communicator, folder: Path) -> None:
    optimizer = trained(comm, 1)
    save_beside(folder / "last.ckpt", [optimizer], comm)
    comm.barrier()
    if comm.rank == 1:
        (folder / "last.ckpt.rank1-of-2").write_bytes(b"no state")
    with pytest.raises(Exception, match=r"last.ckpt.rank1-of-2 is damaged") as error:
        load_beside(folder / "last.ckpt", [optimizer], comm)
    assert type(error.value).__name__ == ("ValueError" if comm.rank else "CollectiveMismatch")


@two_ranks
def test_sets_of_several_jobs_are_refused(comm: Communicator, folder: Path) -> None:
    for ranks in (3, 4):
        (folder / f"last.ckpt.rank0-of-{ranks}").touch()
    with pytest.raises(ValueError, match="are states of 3 and 4 ranks: remove all but one set"):
        load_beside(folder / "last.ckpt", [trained(comm, 1)], comm)


@two_ranks
def test_a_save_leaves_no_files_of_another_number_of_ranks(comm: Communicator, folder: Path) -> None:
    path = folder / "stop.ckpt"
    for rank in range(2):
        (folder / f"stop.ckpt.rank{rank + 2 * comm.rank}-of-4").touch()
    comm.barrier()
    save_beside(path, [trained(comm, 1)], comm)
    comm.barrier()
    assert {one.name for one in folder.iterdir()} == {"stop.ckpt.rank0-of-2", "stop.ckpt.rank1-of-2"}
    assert load_beside(path, [trained(comm, 2)], comm)


@two_ranks
def test_sets_of_which_one_fits_are_refused(comm: Communicator, folder: Path) -> None:
    save_beside(folder / "last.ckpt", [trained(comm, 1)], comm)
    (folder / "last.ckpt.rank0-of-1").touch()
    comm.barrier()
    with pytest.raises(ValueError, match="are states of 1 and 2 ranks: remove all but one set"):
        load_beside(folder / "last.ckpt", [trained(comm, 1)], comm)


@two_ranks
def test_files_of_several_saves_are_refused_on_all_ranks(comm: Communicator, folder: Path) -> None:
    for name in ("last.ckpt", "other.ckpt"):
        save_beside(folder / name, [trained(comm, 1)], comm)
    comm.barrier()
    if comm.rank == 1:
        (folder / "other.ckpt.rank1-of-2").replace(folder / "last.ckpt.rank1-of-2")
    comm.barrier()
    with pytest.raises(ValueError, match="were not written together"):
        load_beside(folder / "last.ckpt", [trained(comm, 1)], comm)


@two_ranks
def test_an_incomplete_set_that_one_rank_sees_is_refused_on_all(comm: Communicator, folder: Path) -> None:
    path = folder / f"node{comm.rank}" / "last.ckpt"
    path.parent.mkdir()
    if comm.rank == 1:
        (path.parent / "last.ckpt.rank1-of-2").touch()
    with pytest.raises(ValueError, match="the file of rank 0 of 2 is missing"):
        load_beside(path, [trained(comm, 1)], comm)


def test_what_cannot_be_written_is_an_error_on_all_ranks(comm: Communicator, folder: Path) -> None:
    (folder / "file").touch()
    comm.barrier()
    with pytest.raises(OSError, match=r"the states of ranks next to .* cannot be written: rank 0"):
        save_beside(folder / "file" / "last.ckpt", [trained(comm, 1)], comm)


def test_a_disk_that_fills_on_one_rank_is_an_error_on_all_ranks(comm: Communicator, folder: Path) -> None:
    """The limit of a process's files stands for the disk: the file begins, and cannot be completed."""
    optimizer = trained(comm, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if comm.rank == comm.size - 1 else soft, hard))
    try:
        with pytest.raises(OSError, match=rf"rank {comm.size - 1} of .*File too large: '.*'; make room there, or name"):
            save_beside(folder / "last.ckpt", [optimizer], comm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    comm.barrier()
    save_beside(folder / "last.ckpt", [optimizer], comm)
    assert load_beside(folder / "last.ckpt", [optimizer], comm)
