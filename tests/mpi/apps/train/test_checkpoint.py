"""Checkpoints are whole or not there, and every damage is told on every rank."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as to_safetensors

from apps.train import checkpoint
from apps.train.agreement import JobError
from collectives import Communicator
from tests.mpi.lanes import few_ranks

pytestmark = few_ranks


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


def test_another_number_of_ranks_is_refused(folder: Path, comm: Communicator) -> None:
    manifest = save(folder, comm, 2) / "manifest.json"
    if comm.rank == 0:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"ranks": 99}))
    comm.barrier()
    with pytest.raises(JobError, match=rf"was written by 99 ranks and this job has {comm.size}"):
        checkpoint.load(folder, comm)


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
