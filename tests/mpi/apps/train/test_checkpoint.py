"""Checkpoints are whole or absent, and damage is one error on every rank."""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as to_safetensors

from apps.train import checkpoint
from apps.train import saver as saver_module
from apps.train.agreement import JobError
from apps.train.checkpoint_files import CheckpointFiles
from apps.train.saver import Saver
from collectives import Communicator
from collectives.errors import CollectiveMismatch
from tests.mpi.apps.train.ranks import first_ranks
from tests.mpi.lanes import up_to_two_ranks

pytestmark = up_to_two_ranks


def save(folder: Path, comm: Communicator, step: int) -> Path:
    model = {"weight": torch.full((3,), float(step))}
    state = {"step": step, "residual": np.full(1000, comm.rank + step, np.float32)}
    return checkpoint.save(folder, comm, step, {"lr": 0.1}, model, state)


def test_every_rank_gets_back_its_own_state(folder: Path, comm: Communicator) -> None:
    assert checkpoint.load(folder / "none yet", comm) is None
    save(folder, comm, 5)
    path = save(folder, comm, 10)
    found = checkpoint.load(folder, comm)
    assert found is not None
    assert found.path == path == folder / "step-00000010"
    assert found.options == {"lr": 0.1}
    assert torch.equal(found.model["weight"], torch.full((3,), 10.0))
    assert found.state["step"] == 10
    assert (found.state["residual"] == comm.rank + 10).all()


def test_two_newest_are_kept_and_nothing_else(folder: Path, comm: Communicator) -> None:
    for step in (1, 2, 3, 3):
        save(folder, comm, step)
    comm.barrier()
    assert sorted(path.name for path in folder.glob("*step*")) == ["step-00000002", "step-00000003"]
    assert checkpoint.load(folder, comm) is not None


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "shorter": lambda content: content[:-10],
    "a bit flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "rank-00000.safetensors"])
def test_a_damaged_file_is_named_with_the_cure(
    folder: Path, comm: Communicator, damage: Callable[[bytes], bytes] | None, name: str
) -> None:
    save(folder, comm, 1)
    newest = save(folder, comm, 2)
    if comm.rank == 0:
        content = (newest / name).read_bytes()
        (newest / name).unlink()
        if damage is not None:
            (newest / name).write_bytes(damage(content))
    comm.barrier()
    message = rf"rank 0 of {comm.size}: {newest / name} is .*; remove the folder {newest} to resume from step-00000001"
    with pytest.raises(JobError, match=message):
        checkpoint.load(folder, comm)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        '{"ranks": 1',
        "\udcff",
        "[" * 100_000,
        "[]",
        {"ranks": 10**400},
        {"ranks": "1"},
        {"ranks": 0},
        {"ranks": None},
        {"header": []},
        {"header": {}},
        {"header": {"options": 1}},
        {"sha256": "0"},
    ],
    ids=lambda content: str(content)[:30],
)
def test_a_damaged_manifest_is_named(folder: Path, comm: Communicator, content: str | dict[str, Any] | None) -> None:
    manifest = save(folder, comm, 2) / "manifest.json"
    if comm.rank == 0 and isinstance(content, dict):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | content))
    elif comm.rank == 0:
        manifest.unlink()
        if content is not None:
            manifest.write_bytes(content.encode(errors="surrogateescape"))
    comm.barrier()
    with pytest.raises(JobError, match=rf"^rank 0 of {comm.size}: {manifest} is missing or damaged .* afresh$"):
        checkpoint.load(folder, comm)


@pytest.mark.parametrize("key", ["manifest", "text"])
def test_a_signed_state_that_is_none_of_ours_is_named(folder: Path, comm: Communicator, key: str) -> None:
    """A file whose SHA-256 is the manifest's may still hold anything."""
    path = save(folder, comm, 2)
    state, manifest = path / f"rank-{comm.size - 1:05d}.safetensors", path / "manifest.json"
    if comm.rank == 0:
        content = b"no tensors" if key == "manifest" else to_safetensors({}, {"state": '{"tensor": "7"}'})
        state.write_bytes(content)
        signed = json.loads(manifest.read_text())
        signed["sha256"][state.name] = hashlib.sha256(content).hexdigest()
        manifest.write_text(json.dumps(signed))
    comm.barrier()
    told = "is damaged" if key == "manifest" else "holds no state of apps.train"
    with pytest.raises(JobError, match=rf"^rank {comm.size - 1} of {comm.size}: {state} {told} .* afresh$"):
        checkpoint.load(folder, comm)


def residuals_summed(states: list[Any], ranks: int) -> list[Any]:
    """New ranks have the sum of the old ones' residuals, and know of how many."""
    total = {"step": states[0]["step"], "residual": sum(state["residual"] for state in states)}
    return [{**total, "old": states[0].get("old", len(states)), "rank": rank, "ranks": ranks} for rank in range(ranks)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("to_more", [False, True])
def test_another_number_of_ranks_gets_what_is_made_of_all_states(
    folder: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch, to_more: bool
) -> None:
    old, new = (comm.size - 1, comm.size) if to_more else (comm.size, comm.size - 1)
    verified = []
    verify = CheckpointFiles.verify
    monkeypatch.setattr(CheckpointFiles, "verify", lambda self, name: (verified.append(name), verify(self, name))[1])
    with first_ranks(comm, old) as part:
        if part is not None:
            save(folder, part, 10)
    with first_ranks(comm, new) as part:
        if part is not None:
            found = checkpoint.load(folder, part, residuals_summed)
            assert found is not None
            assert (found.ranks, found.state["old"]) == (old, old)
            assert (found.state["rank"], found.state["ranks"]) == (part.rank, new)
            assert (found.state["residual"] == sum(rank + 10 for rank in range(old))).all()
            assert torch.equal(found.model["weight"], torch.full((3,), 10.0))
    everyones = sorted(name for names in comm.mpi_comm.allgather(verified) for name in names if "rank" in name)
    assert everyones == [f"rank-{rank:05d}.safetensors" for rank in range(old)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_of_another_number_of_ranks_is_told_on_every_rank(
    folder: Path, comm: Communicator, damage: Callable[[bytes], bytes] | None
) -> None:
    state = save(folder, comm, 2) / f"rank-{comm.size - 1:05d}.safetensors"
    if comm.rank == 0:
        content = state.read_bytes()
        state.unlink()
        if damage is not None:
            state.write_bytes(damage(content))
    with first_ranks(comm, comm.size - 1) as part:
        if part is not None:
            with pytest.raises(JobError, match=rf"^rank 0 of {part.size}: {state} is .*; remove the folder .* afresh$"):
                checkpoint.load(folder, part, residuals_summed)


@pytest.mark.mpi(min_size=2)
def test_states_that_cannot_be_joined_are_told_on_every_rank(folder: Path, comm: Communicator) -> None:
    save(folder, comm, 2)

    def refuse(states: list[Any], ranks: int) -> list[Any]:
        raise KeyError("optimizer")

    with first_ranks(comm, comm.size - 1) as part:
        if part is not None:
            with pytest.raises(JobError, match=r"states in .* cannot be joined \(KeyError\('optimizer'\)\); remove"):
                checkpoint.load(folder, part, refuse)
            with pytest.raises(JobError, match=rf"was written by {comm.size} ranks and this job has {part.size}; st"):
                checkpoint.load(folder, part)


def test_a_full_disk_on_one_rank_fails_all_and_leaves_the_previous_whole(
    folder: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, comm, 1)

    def disk_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    last = comm.size - 1
    with monkeypatch.context() as patch:
        if comm.rank == last:
            patch.setattr(os, "fsync", disk_full)
        with pytest.raises(JobError, match=rf"^rank {last} of .* cannot write .*rank-{last:05d}.* \(No space left"):
            save(folder, comm, 2)
    comm.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    found = checkpoint.load(folder, comm)
    assert found is not None
    assert found.state["step"] == 1
    save(folder, comm, 2)
    assert checkpoint.load(folder, comm) is not None


def test_a_folder_that_cannot_be_made_is_told(folder: Path, comm: Communicator) -> None:
    if comm.rank == 0:
        (folder / "file").write_text("")
    comm.barrier()
    with pytest.raises(JobError, match=r"^rank 0 of .*Not a directory"):
        save(folder / "file" / "checkpoints", comm, 1)


@pytest.mark.mpi(min_size=2, max_size=3)
def test_models_that_differ_are_not_saved(folder: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, comm.rank)
    training = SimpleNamespace(model=model, optimizer=SimpleNamespace(models_differ=False), step=4)
    options = argparse.Namespace(checkpoint=folder / "run", checkpoint_every=(1, "steps"))
    monkeypatch.setattr(saver_module, "identity", lambda *about: {})
    saver = Saver(options, comm, training)
    monkeypatch.setattr(comm, "stop_requested", lambda: True)
    with pytest.raises(CollectiveMismatch, match=r"the first of which is 'weight'"):
        saver.after_step()
    assert not options.checkpoint.exists()
