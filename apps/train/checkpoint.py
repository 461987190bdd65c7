"""Checkpoints of a job: each is whole, or not there at all.

The folder ``DIR/step-00000120/`` holds ``model.safetensors`` (the model of rank 0, for any tool),
``rank-00003.safetensors`` (the state that only rank 3 has: optimizer, residuals, random state) and ``manifest.json``
(step, options, SHA-256 of every file). All ranks write into a ``.partial`` folder, flush it to the disk and agree that
they have; then rank 0 renames the folder. All ranks must see it. The two newest checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from apps.train.agreement import JobError, any_rank, gather_rows, naming_cure, raise_on_all_ranks
from apps.train.checkpoint_files import LEAVES, MANIFEST, MODEL, CheckpointFiles, joined, rank_file
from collectives import Communicator
from collectives.atomic_file import flush_folder, flushed
from mpicomp.state.state_file import split
from mpicomp.torch import broadcast_parameters

Redistribute = Callable[[list[Any], int], list[Any]]

KEPT = 2
_CURE = "--checkpoint folder, earlier checkpoints are whole"
_NAME = re.compile(r"step-(\d{8,15})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load` found: who wrote it, the options of its run, its model and the state of this rank.

    It has `moved` if another number of ranks wrote it, or ranks on other nodes.
    """

    path: Path
    ranks: int
    options: dict[str, Any]
    model: dict[str, Tensor]
    state: Any
    moved: bool


def save(
    folder: Path, comm: Communicator, step: int, options: dict[str, Any], model: dict[str, Tensor], state: Any
) -> Path | None:
    """Write the checkpoint of a step, unless it is there; collective.

    If a rank cannot write, every rank raises JobError, and earlier checkpoints are untouched. If a rank dies meanwhile,
    all survivors return None, and can save their states of now.

    Parameters
    ----------
    folder
        It holds the checkpoints, on a file system that all ranks see; it is made if it is missing.
    options
        Options of the run, the same on all ranks; can be written as JSON.
    model
        That of rank 0 is written.
    state
        The state of this rank: nested dicts, lists and tuples of tensors, arrays, numbers, texts and None.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    exists = False
    rank, size = comm.rank, comm.size  # those of after a death are for the next attempt
    with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
        exists = final.is_dir()
        if rank == 0 and not exists:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    found = gather_rows(comm, np.array([exists, size], np.float64))
    # Ranks that found a death earlier than others have had other numbers in this attempt.
    if (found[:, 1] != len(found)).any():
        return None
    if found[:, 0].any():
        return final
    digests = np.zeros((2, 8), "<u4")  # SHA-256 of this rank's state and of the model
    try:
        with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
            leaves, text = split(state, LEAVES)
            tensors = {key: _contiguous(leaf) for key, leaf in leaves.items()}
            digests[0] = _write(partial / rank_file(rank), to_safetensors(tensors, {"state": text}))
            if rank == 0:
                digests[1] = _write(partial / MODEL, to_safetensors(model))
        table = gather_rows(comm, digests.astype(np.float64)).astype("<u4")
        if len(table) != size:
            return None
        renamed = False
        with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
            if rank == 0:
                sha256 = {rank_file(one): table[one, 0].tobytes().hex() for one in range(size)}
                sha256[MODEL] = table[0, 1].tobytes().hex()
                manifest = {"ranks": size, "step": step, "header": {"options": options}, "sha256": sha256}
                _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
                flush_folder(partial)
                partial.rename(final)
                flush_folder(folder)
                for old in checkpoints(folder)[:-KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
                renamed = True
        if not any_rank(comm, renamed):  # rank 0 has died
            return None
    except JobError:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load(
    folder: Path,
    comm: Communicator,
    redistribute: Redistribute | None = None,
    on_same_nodes: Callable[[dict[str, Any]], bool] = lambda options: True,
) -> Checkpoint | None:
    """Read the newest checkpoint and verify every file that is read; collective. None if there is no checkpoint yet.

    If a file is missing, truncated, altered or of another program, every rank raises JobError.

    Parameters
    ----------
    folder
        As for `save`.
    redistribute
        Makes, of the states of all ranks in rank order, those of another number of ranks: it is called as
        ``redistribute(states, ranks)`` if another number wrote the checkpoint. Rank 0 makes one state of all, and every
        rank its own of that one. Without it, such a checkpoint is an error.
    on_same_nodes
        Returns False if the run with these options had other nodes, so that its states must be redistributed too.
    """
    found, model, state = None, {}, None
    newest = -1
    with raise_on_all_ranks(comm):
        paths = checkpoints(folder)
        if paths:
            newest, found = _step(paths[-1]), CheckpointFiles(paths[-1], _cure(paths))
    steps = gather_rows(comm, np.array([float(newest)]))[:, 0]
    with raise_on_all_ranks(comm):
        if (steps != steps[0]).any():
            raise ValueError(f"{folder} shows this rank other checkpoints than rank 0; use a folder all ranks see")
        if found is not None and found.ranks != comm.size and redistribute is None:
            raise ValueError(
                f"{found.path} was written by {found.ranks} ranks and this job has {comm.size}; start as many"
            )
    if found is None:
        return None
    moved = found.ranks != comm.size or not on_same_nodes(found.options)
    with raise_on_all_ranks(comm):
        model = found.model()
        # Each file is read through by one rank, also where there are more files or fewer than ranks.
        for rank in range(comm.rank, found.ranks, comm.size):
            found.verify(rank_file(rank))
        if not moved:
            state = found.state(comm.rank)
    if moved and redistribute is not None:
        state = _redistributed(found, comm, redistribute)
    return Checkpoint(found.path, found.ranks, found.options, model, state, moved)


def _redistributed(files: CheckpointFiles, comm: Communicator, redistribute: Redistribute) -> Any:
    """Read a checkpoint that other ranks wrote, and return the state for this rank; collective."""
    tensors: dict[str, Tensor] = {}
    told = ""
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            states = [files.state(rank) for rank in range(files.ranks)]
            try:
                (merged,) = redistribute(states, 1)
            except Exception as error:  # the states may be another program's
                raise ValueError(f"the states in {files.path} cannot be joined ({error!r}); {files.cure}") from error
            leaves, text = split(merged, LEAVES)
            tensors = {key: _contiguous(leaf) for key, leaf in leaves.items()}
            layout = {key: (str(one.dtype).removeprefix("torch."), *one.shape) for key, one in tensors.items()}
            told = json.dumps({"state": text, "layout": layout})
    found = json.loads(comm.broadcast_object(told))
    if comm.rank != 0:
        tensors = {
            key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, (dtype, *shape) in found["layout"].items()
        }
    broadcast_parameters(tensors, comm)
    return redistribute([joined(found["state"], tensors)], comm.size)[comm.rank]


def require_writable(folder: Path, comm: Communicator) -> None:
    """Make the folder, so that a run that cannot be saved ends, by JobError, before its first epoch; collective."""
    with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _contiguous(leaf: Tensor | np.ndarray) -> Tensor:
    """A copy that shares no memory with other leaves, as safetensors demands."""
    tensor = leaf.detach() if isinstance(leaf, Tensor) else torch.from_numpy(leaf)
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def _cure(paths: list[Path]) -> str:
    """Return the cure if the newest of these checkpoints is damaged."""
    older = f"resume from {paths[-2].name}" if len(paths) > 1 else "start afresh"
    return f"remove the folder {paths[-1]} to {older}"


def _write(path: Path, content: bytes) -> np.ndarray:
    """Write and flush a file; returns its SHA-256 as eight uint32."""
    with flushed(path) as file:
        file.write(content)
    return np.frombuffer(hashlib.sha256(content).digest(), "<u4")
