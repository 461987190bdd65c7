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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from apps.train.agreement import JobError, naming_cure, raise_on_all_ranks
from apps.train.run_records import MOST_DIGITS
from collectives import Communicator
from collectives.json_file import fields, parse_json
from mpicomp.checkpoint.atomic_file import flush_folder, flushed
from mpicomp.checkpoint.tree import join, split
from mpicomp.cli.timing import gather

KEPT = 2
_CURE = "--checkpoint folder, earlier checkpoints are whole"
_MANIFEST = "manifest.json"
_MODEL = "model.safetensors"
_NAME = re.compile(r"step-(\d{8,15})")
_LEAVES = {"tensor": Tensor, "array": np.ndarray}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `load` found: the options of its run, the tensors of the model and the state of this rank."""

    path: Path
    options: dict[str, Any]
    model: dict[str, Tensor]
    state: Any


def save(
    folder: Path, comm: Communicator, step: int, options: dict[str, Any], model: dict[str, Tensor], state: Any
) -> Path:
    """Write the checkpoint of a step, unless it is there; collective.

    If a rank cannot write, every rank raises JobError, and earlier checkpoints are untouched.

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
    with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
        exists = final.is_dir()
        if comm.rank == 0 and not exists:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    if gather(comm, np.array([float(exists)])).any():
        return final
    digests = np.zeros((2, 8), "<u4")  # SHA-256 of this rank's state and of the model
    try:
        with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
            leaves, text = split(state, _LEAVES)
            tensors = {key: _contiguous(leaf) for key, leaf in leaves.items()}
            digests[0] = _write(partial / _rank_file(comm.rank), to_safetensors(tensors, {"state": text}))
            if comm.rank == 0:
                digests[1] = _write(partial / _MODEL, to_safetensors(model))
        table = gather(comm, digests.astype(np.float64)).astype("<u4")
        with raise_on_all_ranks(comm), naming_cure(folder, _CURE):
            if comm.rank == 0:
                sha256 = {_rank_file(rank): table[rank, 0].tobytes().hex() for rank in range(comm.size)}
                sha256[_MODEL] = table[0, 1].tobytes().hex()
                manifest = {"ranks": comm.size, "step": step, "header": {"options": options}, "sha256": sha256}
                _write(partial / _MANIFEST, json.dumps(manifest, indent=1).encode())
                flush_folder(partial)
                partial.rename(final)
                flush_folder(folder)
                for old in checkpoints(folder)[:-KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
    except JobError:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load(folder: Path, comm: Communicator) -> Checkpoint | None:
    """Read the newest checkpoint and verify every file that is read; collective. None if there is no checkpoint yet.

    If a file is missing, truncated, altered or of another program, or if another number of ranks wrote the checkpoint,
    every rank raises JobError.
    """
    found: Checkpoint | None = None
    newest = -1
    with raise_on_all_ranks(comm):
        paths = checkpoints(folder)
        if paths:
            found, newest = _read_checkpoint(paths[-1], comm, _cure(paths)), _step(paths[-1])
    steps = gather(comm, np.array([float(newest)]))[:, 0]
    with raise_on_all_ranks(comm):
        if (steps != steps[0]).any():
            raise ValueError(f"{folder} shows this rank other checkpoints than rank 0; use a folder all ranks see")
    return found


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


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _contiguous(leaf: Tensor | np.ndarray) -> Tensor:
    """A copy that shares no memory with other leaves, as safetensors demands."""
    tensor = leaf.detach() if isinstance(leaf, Tensor) else torch.from_numpy(leaf)
    return tensor.clone(memory_format=torch.contiguous_format)


def _cure(paths: list[Path]) -> str:
    """What to do if the newest of these checkpoints is damaged."""
    older = f"resume from {paths[-2].name}" if len(paths) > 1 else "start afresh"
    return f"remove the folder {paths[-1]} to {older}"


def _write(path: Path, content: bytes) -> np.ndarray:
    """Write and flush a file; returns its SHA-256 as eight uint32."""
    with flushed(path) as file:
        file.write(content)
    return np.frombuffer(hashlib.sha256(content).digest(), "<u4")


def _read_checkpoint(path: Path, comm: Communicator, cure: str) -> Checkpoint:
    manifest = _read_manifest(path / _MANIFEST, cure)
    if manifest["ranks"] != comm.size:
        raise ValueError(
            f"{path} was written by {manifest['ranks']} ranks and this job has {comm.size}; start as many, since each "
            "resumes its own residual"
        )
    model, _ = _read_tensors(path / _MODEL, manifest["sha256"], cure)
    tensors, text = _read_tensors(path / _rank_file(comm.rank), manifest["sha256"], cure)
    try:
        state = join(text, {"tensor": tensors.__getitem__, "array": lambda key: tensors[key].numpy()})
    except Exception as error:  # the text may be anything: nothing but its SHA-256 has been looked at
        raise ValueError(f"{path / _rank_file(comm.rank)} holds no state of apps.train ({error!r}); {cure}") from error
    return Checkpoint(path, manifest["header"]["options"], model, state)


def _read_manifest(path: Path, cure: str) -> dict[str, Any]:
    manifest: dict[str, Any]
    try:
        manifest = parse_json(path.read_text(), most_digits=MOST_DIGITS)
        fields(fields(manifest, ranks=int, header=dict, sha256=dict)["header"], options=dict)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}); {cure}") from error
    return manifest


def _read_tensors(path: Path, sha256: dict[str, str], cure: str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file and the text beside them, after comparing the file with its SHA-256."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; {cure}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256.get(path.name):
        raise ValueError(f"{path} is truncated or altered (its SHA-256 is not that of the manifest); {cure}")
    try:
        with safe_open(path, framework="pt") as file:
            names, metadata = file.keys(), file.metadata() or {}
            return {name: file.get_tensor(name) for name in names}, metadata.get("state", "")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); {cure}") from error
