"""Checkpoints of a job: one file a rank, whole or not there at all.

``DIR/step-00000120/`` holds ``model.safetensors`` (rank 0's model, for any tool), ``rank-00003.safetensors`` (what rank
3 alone knows: optimizer, residuals, random state) and ``manifest.json`` (position, options, SHA-256 of every file). All
ranks write into a ``.partial`` folder, flush it to the disk and agree; then rank 0 renames it. The folder is one that
all ranks see. The two newest checkpoints are kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from apps.train.agreement import JobError, gather, together
from apps.train.packing import pack, unpack
from collectives import Communicator
from mpicomp.checkpoint.atomic_file import flush_folder, flushed

KEPT = 2
_MANIFEST = "manifest.json"
_MODEL = "model.safetensors"
_DIGEST_WORDS = 8


@dataclass(frozen=True)
class Checkpoint:
    """What `load` found: the manifest's `header`, the `model` tensors and this rank's `state`."""

    path: Path
    header: dict[str, Any]
    model: dict[str, Tensor]
    state: Any


def save(
    folder: Path, comm: Communicator, step: int, header: dict[str, Any], model: dict[str, Tensor], state: Any
) -> Path:
    """Write a checkpoint; collective.

    Parameters
    ----------
    folder
        Where checkpoints lie, on a file system all ranks see; made if missing.
    step
        Names the checkpoint; one that exists already is left as it is.
    header
        JSON-able, the same on all ranks.
    model
        Rank 0's are written.
    state
        This rank's own, as `apps.train.packing.pack` takes it.

    Raises
    ------
    JobError
        On every rank, if any could not write. Earlier checkpoints are untouched.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    exists = False
    with together(comm), _writing(folder):
        exists = final.is_dir()
        if comm.rank == 0 and not exists:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    if gather(comm, [exists]).any():
        return final
    digests = np.zeros((2, _DIGEST_WORDS), dtype="<u4")
    try:
        with together(comm), _writing(folder):
            tensors, text = pack(state)
            digests[0] = _write(partial / _rank_file(comm.rank), to_safetensors(tensors, {"state": text}))
            if comm.rank == 0:
                digests[1] = _write(partial / _MODEL, to_safetensors(model))
        table = gather(comm, digests.reshape(-1)).astype("<u4").reshape(comm.size, 2, _DIGEST_WORDS)
        with together(comm), _writing(folder):
            if comm.rank == 0:
                files = {_rank_file(rank): table[rank, 0].tobytes().hex() for rank in range(comm.size)}
                files[_MODEL] = table[0, 1].tobytes().hex()
                manifest = {"ranks": comm.size, "step": step, "header": header, "sha256": files}
                _write(partial / _MANIFEST, json.dumps(manifest, indent=1).encode())
                flush_folder(partial)
                partial.rename(final)
                flush_folder(folder)
                for old in _checkpoints(folder)[:-KEPT]:
                    shutil.rmtree(old, ignore_errors=True)
    except JobError:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load(folder: Path, comm: Communicator) -> Checkpoint | None:
    """Read the newest checkpoint, every file verified; collective. None if there is none yet.

    Raises
    ------
    JobError
        On every rank, if a file is missing, truncated or altered, or was written by another number of ranks.
    """
    found: Checkpoint | None = None
    with together(comm):
        checkpoints = _checkpoints(folder)
        if checkpoints:
            path = checkpoints[-1]
            older = f"resume from {checkpoints[-2].name}" if len(checkpoints) > 1 else "start afresh"
            cure = f"remove the folder {path} to {older}"
            manifest = _read_manifest(path, cure)
            if manifest["ranks"] != comm.size:
                raise ValueError(
                    f"{path} was written by {manifest['ranks']} ranks and this job has {comm.size}; start as many, "
                    "since each resumes its own residual"
                )
            model, _ = _read(path / _MODEL, manifest["sha256"], cure)
            tensors, text = _read(path / _rank_file(comm.rank), manifest["sha256"], cure)
            found = Checkpoint(path, manifest["header"], model, unpack(tensors, text))
    newest = gather(comm, [-1 if found is None else int(found.path.name.removeprefix("step-"))])
    with together(comm):
        if (newest != newest[0]).any():
            raise ValueError(f"{folder} shows this rank other checkpoints than rank 0; use a folder all ranks see")
    return found


def require_writable(folder: Path, comm: Communicator) -> None:
    """Make the folder if need be, so that a run learns before its first epoch that it cannot be saved; collective.

    Raises
    ------
    JobError
        On every rank, if any cannot write into it.
    """
    with together(comm), _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def exist(folder: Path) -> bool:
    """Whether `folder` holds a checkpoint."""
    return bool(_checkpoints(folder))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Name file, cause and cure in whatever the file system refuses."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {error.filename or folder} ({error.strerror}); make room there or name another --checkpoint "
            "folder, earlier checkpoints are whole"
        ) from error


def _write(path: Path, content: bytes) -> np.ndarray:
    """Write and flush a file; returns its SHA-256 as eight uint32."""
    with flushed(path) as file:
        file.write(content)
    return np.frombuffer(hashlib.sha256(content).digest(), dtype="<u4")


def _read_manifest(path: Path, cure: str) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / _MANIFEST} is missing or damaged ({error}); {cure}") from error
    return manifest


def _read(path: Path, sha256: dict[str, str], cure: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file and the text packed with them, after checking its bytes."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; {cure}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256.get(path.name):
        raise ValueError(f"{path} is truncated or altered (its SHA-256 is not the manifest's); {cure}")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, (file.metadata() or {}).get("state", "")  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); {cure}") from error
