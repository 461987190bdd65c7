"""Folder of checkpoints, one for a step: each is complete or absent.

``step-00000012/`` has ``replica-0-stage-1.pt``, one for each rank that was alive, and ``manifest.json`` with the grid
and the ranks that were not. Without a pipeline a rank is a replica of one stage. The ranks write into a hidden folder;
once all have written, one of them renames it.
"""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from collectives.atomic_file import flush_folder, flushed
from collectives.json_file import parse_json
from collectives.quoting import one_line

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
_KEPT = 2  # checkpoints, the newest ones
_NAME = re.compile(r"step-(\d{8,15})")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the oldest first."""
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
        fault = f"{here}: {one_line(error) or type(error).__name__}"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fault += "; make room there, or name another folder"
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
    partial = folder / f".{final.name}.partial"
    places = gather((place, step in written and final.is_dir()))
    if any(is_there for _, is_there in places):
        return final
    first = places[0][0] == place

    def make_folder() -> None:
        if first:
            if final.exists():
                raise FileExistsError(f"{final} is of another run: name another folder, or remove this one")
            for unfinished in folder.glob(".step-*.partial"):  # of runs that were ended while they wrote or removed
                shutil.rmtree(unfinished, ignore_errors=True)
            partial.mkdir(parents=True)

    def write_state() -> None:
        state = make_state()  # may fail on this rank alone, such as on a full disk
        with flushed(partial / state_file(place)) as file:
            torch.save(state, file)
        if not written:
            _check_types(partial / state_file(place), state)

    def finish() -> None:
        if first:
            replicas, stages = grid
            manifest = {"step": step, "replicas": replicas, "stages": stages, "lost": [list(one) for one in lost]}
            _complete(partial, final, json.dumps(manifest))

    on_all_ranks(gather, here, kind, make_folder)
    on_all_ranks(gather, here, kind, write_state)
    written.add(step)  # before others can die in `finish`: the folder is then this run's
    on_all_ranks(gather, here, kind, finish)
    return final


def _complete(partial: Path, final: Path, manifest: str) -> None:
    """Make a folder with the states of all ranks a checkpoint, and remove earlier checkpoints."""
    folder = final.parent
    with flushed(partial / MANIFEST) as file:
        file.write(manifest.encode())
    flush_folder(partial)
    partial.rename(final)
    flush_folder(folder)
    # another run may have left later steps
    for old in [one for one in checkpoints(folder) if one != final][: 1 - _KEPT]:
        hidden = folder / f".{old.name}.partial"  # or a run that is ended now would leave a part of it
        with suppress(OSError):
            old.rename(hidden)
            shutil.rmtree(hidden)


def _check_types(file: Path, state: dict[str, Any]) -> None:
    """Raise TypeError unless `read_state` can load a file that was written just now."""
    if _can_be_loaded(str(file)):
        return
    names = []
    for name, part in state["parts"].items():
        content = io.BytesIO()
        torch.save(part, content)
        content.seek(0)
        if not _can_be_loaded(content):
            names.append(name)
    raise TypeError(
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
    found = parse_json((path / MANIFEST).read_text())
    try:
        theirs = found["replicas"], found["stages"]
        lost = [(int(replica), int(stage)) for replica, stage in found["lost"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error!r}): remove {path} to load an earlier one") from error
    if grid is not None and theirs != grid:
        raise ValueError(
            f"{path} is of {theirs[0]} replicas of {theirs[1]} stages, and there are {grid[0]} of {grid[1]}: start as "
            "many ranks, or name another folder"
        )
    return theirs, lost


def read_state(path: Path, place: Place) -> dict[str, Any]:
    """Return the state of a rank in a checkpoint; ValueError or OSError if its file is missing or damaged."""
    file = path / state_file(place)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # any error of zipfile and pickle on foreign bytes
        raise ValueError(f"{file} is damaged ({one_line(error)}): remove {path} to load an earlier one") from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} is damaged: remove {path} to load an earlier one")
    return state
