"""Checkpoints of all ranks in one folder: exact on as many ranks, merged on others, complete or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpicomp
from collectives import CollectiveMismatch, Communicator
from mpicomp import Dense, LocalTopK, Marsit
from mpicomp.torch import DistributedOptimizer, OneBitAdam, load_checkpoint, save_checkpoint
from tests.mpi.lanes import few_ranks, two_ranks

pytestmark = few_ranks
TOP_K = LocalTopK(rate=4)


def make(comm: Communicator, algorithm: Any = TOP_K, **options: Any) -> dict[str, Any]:
    """Return the parts of a training: a model with buffers and dropout, an optimizer and its schedule."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    if algorithm is None:
        optimizer: Any = OneBitAdam(model.named_parameters(), lr=0.01, warmup_steps=2, comm=comm)
    else:
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(adam, algorithm, comm, model.named_parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(parts: dict[str, Any], comm: Communicator, steps: int) -> None:
    for _ in range(steps):
        parts["optimizer"].zero_grad()
        inputs = torch.randn(6, 4) + comm.rank
        parts["model"](inputs).square().mean().backward()
        parts["optimizer"].step()
        parts["schedule"].step()


def values_of(parts: dict[str, Any]) -> torch.Tensor:
    return torch.cat([one.double().flatten() for one in parts["model"].state_dict().values()])


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (LocalTopK(rate=4), {}),
        (Dense(), {}),
        (Marsit(), {}),
        (Marsit(), {"local_steps": 4}),
        ({"*.bias": Dense(), "*": LocalTopK(rate=2)}, {"overlap": False}),
        (None, {}),
    ],
    ids=["top-k", "dense", "marsit", "local steps", "several", "one-bit adam"],
)
def test_as_many_ranks_go_on_to_the_bit(algorithm: Any, options: Any, comm: Communicator, folder: Path) -> None:
    torch.manual_seed(comm.rank)
    parts = make(comm, algorithm, **options)
    train(parts, comm, 3)
    path = save_checkpoint(folder, 3, parts, comm)
    assert path == folder / "step-00000003"
    train(parts, comm, 3)
    others = make(comm, algorithm, **options)
    assert load_checkpoint(folder, others, comm) == 3
    train(others, comm, 3)
    assert torch.equal(values_of(others), values_of(parts))


@two_ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_begin_with_merged_residuals(ranks: int, comm: Communicator, folder: Path) -> None:
    parts = make(comm)
    train(parts, comm, 2)
    mean = comm.allreduce(parts["optimizer"].aggregators[0].residual.copy(), "mean")
    save_checkpoint(folder, 2, parts, comm)

    def resume(alone: Communicator) -> Any:
        found = make(alone)
        assert load_checkpoint(folder, found, alone) == 2
        train(found, alone, 1)
        other = make(alone)
        load_checkpoint(folder, other, alone)
        return other["optimizer"].aggregators[0].residual

    if comm.rank == 0:
        for residual in mpicomp.run_local(ranks, resume):
            torch.testing.assert_close(torch.from_numpy(residual), torch.from_numpy(mean))
    comm.barrier()


@two_ranks
def test_equal_tensors_are_written_once_and_each_rank_keeps_its_own(comm: Communicator, folder: Path) -> None:
    model = nn.ModuleDict({"shared": nn.Linear(100, 100), "expert": nn.Linear(10, 10)})
    nn.init.zeros_(model["shared"].weight), nn.init.zeros_(model["shared"].bias)
    nn.init.constant_(model["expert"].weight, comm.rank)
    path = save_checkpoint(folder, 1, {"model": model}, comm)
    assert (
        (path / "replica-1-stage-0.pt").stat().st_size < 4 * 100 * 100 < (path / "replica-0-stage-0.pt").stat().st_size
    )
    nn.init.constant_(model["shared"].weight, 5), nn.init.constant_(model["expert"].weight, 5)
    load_checkpoint(folder, {"model": model}, comm)
    assert (model["shared"].weight == 0).all()
    assert (model["expert"].weight == comm.rank).all()


def test_the_two_newest_are_kept_and_the_newest_is_loaded(comm: Communicator, folder: Path) -> None:
    model = nn.Linear(1, 1)
    for step in (3, 10, 200):
        nn.init.constant_(model.weight, step)
        save_checkpoint(folder, step, {"model": model}, comm)
    assert sorted(one.name for one in folder.iterdir()) == ["step-00000010", "step-00000200"]
    nn.init.zeros_(model.weight)
    assert load_checkpoint(folder, {"model": model}, comm) == 200
    assert model.weight.item() == 200


def test_an_earlier_step_than_one_in_the_folder_is_refused_on_all_ranks(comm: Communicator, folder: Path) -> None:
    save_checkpoint(folder, 5, {"model": nn.Linear(1, 1)}, comm)
    for step, cause in ((4, "is of a later step"), (5, "is of another run")):
        with pytest.raises(OSError, match=cause):
            save_checkpoint(folder, step, {"model": nn.Linear(1, 1)}, comm)
    assert load_checkpoint(folder, {"model": nn.Linear(1, 1)}, comm) == 5


@two_ranks
def test_a_full_disk_of_one_rank_is_an_error_on_all_and_the_checkpoint_before_is_whole(
    comm: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 3)
    nn.init.ones_(model.weight)
    save_checkpoint(folder, 1, {"model": model}, comm)
    nn.init.zeros_(model.weight)
    if comm.rank == 1:

        def save(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"rank 1 of 2: .*No space left on device"):
        save_checkpoint(folder, 2, {"model": model}, comm)
    monkeypatch.undo()
    assert load_checkpoint(folder, {"model": model}, comm) == 1
    assert (model.weight == 1).all()
    save_checkpoint(folder, 2, {"model": model}, comm)


@two_ranks
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_file_of_one_rank_is_an_error_on_all(damage: str, comm: Communicator, folder: Path) -> None:
    parts = make(comm)
    train(parts, comm, 1)
    file = save_checkpoint(folder, 1, parts, comm) / "replica-1-stage-0.pt"
    if comm.rank == 1:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x40
        file.unlink() if damage == "missing" else file.write_bytes(content[: 1000 if damage == "cut" else None])
    comm.barrier()
    with pytest.raises(ValueError, match=r"rank 1 of 2: .*replica-1-stage-0\.pt"):
        load_checkpoint(folder, parts, comm)
    comm.barrier()


def test_states_in_the_middle_of_local_steps_are_not_merged(comm: Communicator, folder: Path) -> None:
    parts = make(comm, Marsit(), local_steps=4)
    train(parts, comm, 3)
    save_checkpoint(folder, 3, parts, comm)

    def resume(alone: Communicator) -> None:
        with pytest.raises(ValueError, match=r"save after optimizer\.synchronize"):
            load_checkpoint(folder, make(alone, Marsit(), local_steps=4), alone)

    if comm.rank == 0:
        mpicomp.run_local(comm.size + 1, resume)
    comm.barrier()


@two_ranks
def test_ranks_that_differ_in_step_or_parts_are_refused(comm: Communicator, folder: Path) -> None:
    parts = {"model": nn.Linear(1, 1)}
    with pytest.raises(CollectiveMismatch, match="save_checkpoint of step 1 with model"):
        save_checkpoint(folder, 1 + comm.rank, parts, comm)
    with pytest.raises(CollectiveMismatch, match="save_checkpoint of step 1 with head"):
        save_checkpoint(folder, 1, parts if comm.rank else {"head": nn.Linear(1, 1)}, comm)
    save_checkpoint(folder, 1, parts, comm)
    with pytest.raises(ValueError, match=r"has the parts \['model'\], not \['head'\]"):
        load_checkpoint(folder, parts if comm.rank else {"head": nn.Linear(1, 1)}, comm)


@two_ranks
def test_an_optimizer_takes_no_state_of_another_order_or_class(comm: Communicator, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)

    def wrap(kind: Any, order: int) -> dict[str, Any]:
        own = kind([*model.parameters()][::order], lr=0.1)
        return {"optimizer": DistributedOptimizer(own, TOP_K, comm, model.named_parameters())}

    save_checkpoint(folder, 1, wrap(torch.optim.Adam, 1), comm)
    for kind, order, cause in (
        (torch.optim.Adam, -1, r"parameter 0 .* was '0\.weight' of shape .* and is '1\.weight'"),
        (torch.optim.SGD, 1, r"state is of an optimizer 'Adam', but this one wraps SGD"),
    ):
        with pytest.raises(ValueError, match=cause):
            load_checkpoint(folder, wrap(kind, order), comm)


@two_ranks
def test_equal_tensors_of_an_optimizers_state_are_merged_too(comm: Communicator, folder: Path) -> None:
    def wrap(alone: Communicator) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        own = torch.optim.SGD(model.parameters())
        own.register_state_dict_post_hook(lambda _, state: {**state, "extra": torch.ones(3)})
        own.register_load_state_dict_pre_hook(lambda _, state: extras.append(state["extra"].sum().item()))
        return {"optimizer": DistributedOptimizer(own, TOP_K, alone, model.named_parameters())}

    extras: list[float] = []
    save_checkpoint(folder, 1, wrap(comm), comm)
    if comm.rank == 0:
        assert mpicomp.run_local(3, lambda alone: load_checkpoint(folder, wrap(alone), alone)) == [1] * 3
        assert extras == [3] * 3
    comm.barrier()
