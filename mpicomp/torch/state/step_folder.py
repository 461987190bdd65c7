"""Folder of checkpoints, one for a step: each is complete or absent.

``step-00000012/`` has ``replica-0-stage-1.pt``, one for each rank that was alive, and ``manifest.json`` with the grid,
the ranks that were not, and the SHA-256 of each file. Without a pipeline a rank is a replica of one stage. The ranks
write into a hidden folder of this save alone; once all have written, one of them renames it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from collectives.atomic_file import create_locked, flush_folder, flushed, hidden_name
from collectives.json_file import fields, read_json
from collectives.quoting import one_line
from collectives.regular_file import open_regular

Gather = Callable[[Any], list[Any]]
"""Exchange of one object of each rank; collective."""
Place = tuple[int, int]
"""Replica and stage of a rank."""

Result = TypeVar("Result")


class Stateful(Protocol):
    """Object whose state can be saved and restored: module, optimizer, state of a hook, learning rate's schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, texts, and lists and dictionaries of these."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from a state; collective for optimizers and hooks of this library."""
        ...


MANIFEST = "manifest.json"
_LOCK = "saving"  # in the name of the file that a save keeps locked
_KEPT = 2  # checkpoints, the newest ones
_NAME = re.compile(r"step-(\d{8,15})")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the oldest first; OSError or ValueError if it is no folder."""
    try:
        mode = folder.stat().st_mode  # `glob` finds nothing in a file, and raises no error
    except FileNotFoundError:
        return []
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(f"{folder} is no folder: name the folder of the checkpoints")
    return sorted((one for one in folder.glob("step-*") if _NAME.fullmatch(one.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(path.name.removeprefix("step-"))


def state_file(place: Place) -> str:
    """Return the name of the file of a rank's state."""
    return f"replica-{place[0]}-stage-{place[1]}.pt"


def on_all_ranks(gather: Gather, here: str, kind: type[Exception], work: Callable[[], Result]) -> Result:
    """Return the result of a function; if it fails on any rank, raise an error of this kind on all; collective."""
    fault, result = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - reported to all ranks
        text = one_line(error)
        if not text or not isinstance(error, OSError | ValueError | RuntimeError):  # str(KeyError("lr")) is "'lr'"
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        fault = f"{here}: {text}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fault += "; make room there, or name another folder"
        elif isinstance(error, FileNotFoundError):
            fault += "; use a folder that all ranks see"
    found = [one for one in gather(fault) if one is not None]
    if found:
        raise kind(found[0])
    return cast(Result, result)


def newest_of_all(gather: Gather, here: str, kind: type[Exception], folder: Path) -> Path | None:
    """Return the newest checkpoint, None in an empty folder; raise an error if ranks see different ones; collective."""
    found = on_all_ranks(gather, here, kind, lambda: checkpoints(folder))
    if len(set(gather(step_of(found[-1]) if found else 0))) > 1:
        raise kind(f"{here}: the ranks see different checkpoints in {folder}: use a folder that all see")
    return found[-1] if found else None


def write(
    gather: Gather,
    here: str,
    kind: type[Exception],
    folder: Path,
    step: int,
    place: Place,
    make_state: Callable[[], dict[str, Any]],
    grid: tuple[int, int],
    lost: Sequence[Place],
    written: set[int],
) -> Path:
    """Write the checkpoint of a step, unless it is there; collective over the ranks of `gather`.

    `grid` has the numbers of replicas and stages, and `lost` the places of ranks that do not write. `written` are the
    steps of the checkpoints that this run has written or loaded; this one is added.

    Raises
    ------
    Exception
        Of this kind: a rank cannot write, or the folder has a checkpoint of this step from another run; on all ranks.
        Earlier checkpoints are untouched.
    """
    final = folder / f"step-{step:08d}"
    places = gather((place, step in written and final.is_dir()))
    if any(is_there for _, is_there in places):
        return final
    first = places[0][0] == place

    own = ExitStack()  # of the first rank: the lock shows other runs that this save lives

    def make_folder() -> str:
        return _make_partial(final, own) if first else ""

    def write_state() -> tuple[str, str]:
        return _write_state(partial / state_file(place), make_state(), is_checked=bool(written))

    def finish() -> None:
        if first:
            places = {"replicas": grid[0], "stages": grid[1], "lost": [list(one) for one in lost]}
            _complete(partial, final, json.dumps({"step": step, **places, "sha256": digests}))
            own.close()

    with own:
        partial = folder / gather(on_all_ranks(gather, here, kind, make_folder))[0]
        digests = dict(gather(on_all_ranks(gather, here, kind, write_state)))
        written.add(step)  # before others can die in `finish`: the folder is then this run's
        on_all_ranks(gather, here, kind, finish)
    return final


def _make_partial(final: Path, own: ExitStack) -> str:
    """Make a hidden folder of this save alone, and return its name; `own` removes it unless it has been renamed."""
    folder = final.parent
    if final.exists():
        raise FileExistsError(f"{final} is of another run: name another folder, or remove this one")
    folder.mkdir(parents=True, exist_ok=True)
    lock = hidden_name(folder / _LOCK)
    own.callback(os.close, create_locked(lock))
    own.callback(lock.unlink, missing_ok=True)
    for unfinished in folder.glob(".step-*.partial"):  # of runs that were ended while they wrote or removed
        # a living save has locked its file before it made its folder
        if not (folder / re.sub(r"\.step-\d+", f".{_LOCK}", unfinished.name, count=1)).exists():
            shutil.rmtree(unfinished, ignore_errors=True)
    partial = folder / lock.name.replace(_LOCK, final.name, 1)
    partial.mkdir()
    own.callback(shutil.rmtree, partial, ignore_errors=True)
    return partial.name


def _write_state(file: Path, state: dict[str, Any], is_checked: bool) -> tuple[str, str]:
    """Write a rank's state, which may fail on this rank alone, and return the file's name and SHA-256."""
    with flushed(file) as opened:
        torch.save(state, opened)
    if not is_checked:
        _check_types(file, state)
    with open_regular(file) as opened:
        return file.name, hashlib.file_digest(opened, "sha256").hexdigest()


def _complete(partial: Path, final: Path, manifest: str) -> None:
    """Make a folder with the states of all ranks a checkpoint, and remove earlier checkpoints."""
    folder = final.parent
    with flushed(partial / MANIFEST) as file:
        file.write(manifest.encode())
    flush_folder(partial)
    try:
        partial.rename(final)
    except OSError as error:
        if not final.exists():
            raise
        raise FileExistsError(
            f"another run has written {final} meanwhile: give each run a folder of its own"
        ) from error
    flush_folder(folder)
    # another run may have left later steps
    for old in [one for one in checkpoints(folder) if one != final][: 1 - _KEPT]:
        hidden = folder / f".{old.name}.partial"  # or a run that is ended now would leave a part of it
        with suppress(OSError):
            old.rename(hidden)
            shutil.rmtree(hidden)


def _check_types(file: Path, state: dict[str, Any]) -> None:
    """Raise ValueError unless `read_state` can load a file that was written just now."""
    if _can_be_loaded(str(file)):
        return
    names = []
    for name, part in state["parts"].items():
        content = io.BytesIO()
        torch.save(part, content)
        content.seek(0)
        if not _can_be_loaded(content):
            names.append(name)
    raise ValueError(
        f"the state_dict of {', '.join(names) or 'the stage'} has a value that torch.load(weights_only=True) refuses: "
        "let it have tensors, numbers, texts, lists and dictionaries alone, no NumPy numbers, enums or Paths"
    )


def _can_be_loaded(file: str | io.BytesIO) -> bool:
    try:
        torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - any error of pickle
        return False
    return True


def read_manifest(path: Path, grid: tuple[int, int] | None = None) -> tuple[tuple[int, int], list[Place]]:
    """Return the grid of a checkpoint, and the places of ranks that were dead when it was written.

    Raises
    ------
    ValueError, OSError
        The checkpoint is not of this grid, or damaged.
    """
    found = _read_manifest(path)
    theirs, lost = (found["replicas"], found["stages"]), found["lost"]
    if grid is not None and theirs != grid:
        raise ValueError(
            f"{path} is of {theirs[0]} replicas of {theirs[1]} stages, and there are {grid[0]} of {grid[1]}: start as "
            "many ranks, or name another folder"
        )
    return theirs, lost


def read_state(path: Path, place: Place) -> dict[str, Any]:
    """Return the state of a rank in a checkpoint; ValueError or OSError if its file is missing or damaged."""
    file, digests = path / state_file(place), _read_manifest(path)["sha256"]
    with open_regular(file) as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != digests.get(file.name):
            raise ValueError(f"{file} is damaged (its SHA-256 is not that of {MANIFEST}): {_cure(path)}")
        opened.seek(0)
        try:
            state = torch.load(opened, map_location="cpu", weights_only=True)
        except Exception as error:  # any error of zipfile and pickle on foreign bytes
            raise ValueError(f"{file} is damaged ({one_line(error)}): {_cure(path)}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} is damaged: {_cure(path)}")
    return state


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the checked manifest of a checkpoint."""
    found = read_json(path / MANIFEST, _cure(path))
    try:
        found = fields(found, replicas=int, stages=int, lost=list, sha256=dict)
        lost = [(int(replica), int(stage)) for replica, stage in found["lost"]]
        if min(found["replicas"], found["stages"]) < 1:
            raise ValueError("it has no replicas or stages")
        if found["replicas"] * found["stages"] != len(lost) + len(found["sha256"]):
            raise ValueError("its numbers of ranks and files differ")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged, or of an early version ({error}): {_cure(path)}") from error
    return {**found, "lost": lost}


def _cure(path: Path) -> str:
    return f"remove {path} to load an earlier one"
