"""A file for each rank next to a checkpoint that a framework writes, with the states of its hooks and optimizers.

Frameworks save the state of rank 0. Residuals, and under "updates" moments too, differ between ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from collectives import Communicator
from collectives.atomic_file import replacing
from collectives.errors import reword
from mpicomp.torch.state.redistribution import redistribute_states
from mpicomp.torch.state.schema import State


class Saved(Protocol):
    """State of a hook, or optimizer."""

    def state_dict(self) -> State:
        """Return this rank's state."""
        ...

    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state; collective."""
        ...


def save_beside(path: Path, owners: Sequence[Saved], comm: Communicator) -> None:
    """Write this rank's file ``PATH.rankR-of-N``; every rank calls this."""
    file = path.with_name(f"{path.name}.rank{comm.rank}-of-{comm.size}")
    problem = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            torch.save([owner.state_dict() for owner in owners], stream)
    except OSError as error:
        problem = f"rank {comm.rank}: {error}"
    problems = [text for text in comm.allgather_object(problem) if text]
    if problems:
        raise OSError(f"{comm.here}: the states of ranks next to {path} cannot be written: {'; '.join(problems)}")


def load_beside(path: Path, owners: Sequence[Saved], comm: Communicator) -> bool:
    """Restore the states in the files of `save_beside`, also on another number of ranks; collective.

    Returns
    -------
    bool
        False on all ranks: no rank has written a file.

    Raises
    ------
    ValueError
        Files of some ranks are missing, or a state does not fit; the other ranks then raise CollectiveMismatch.
    """
    files, problem = _complete_set(path, comm.size)
    seen = comm.allgather_object((len(files), problem))
    if not any(seen[0]) and all(one == seen[0] for one in seen):
        return False
    try:
        if len({count for count, _ in seen}) > 1 or problem:
            raise ValueError(
                problem or f"not all ranks see the files next to {path}: checkpoints must be in a folder of all nodes"
            )
        if len(files) == comm.size:
            states = _read(files[comm.rank])
        else:
            by_rank = [_read(file) for file in files]
            states = [redistribute_states(group, comm.size)[comm.rank] for group in zip(*by_rank, strict=True)]
        if len(states) != len(owners):
            raise ValueError(f"{files[0]} has the states of {len(states)} optimizers, and there are {len(owners)}")
    except (OSError, ValueError) as error:
        comm.reject(reword(error, f"{comm.here}: {error}"), "restoring the states of ranks")
    for owner, state in zip(owners, states, strict=True):
        owner.load_state_dict(state)
    return True


def remove_beside(path: Path) -> None:
    """Remove the files of all ranks."""
    for file in _files(path):
        file.unlink(missing_ok=True)


def _files(path: Path) -> dict[Path, tuple[int, int]]:
    """Return rank and number of ranks of each file."""
    pattern = re.compile(re.escape(path.name) + r"\.rank(\d+)-of-(\d+)")
    folder = path.parent
    found = {file: pattern.fullmatch(file.name) for file in (folder.iterdir() if folder.is_dir() else ())}
    return {file: (int(match[1]), int(match[2])) for file, match in found.items() if match}


def _complete_set(path: Path, ranks: int) -> tuple[list[Path], str]:
    """Return the files of all ranks that wrote them, in rank order, and the problem if some are missing.

    If several jobs wrote files, those of as many ranks as now count.
    """
    found = _files(path)
    sizes = {size for _, size in found.values()}
    if len(sizes) > 1 and ranks not in sizes:
        return [], f"next to {path} are states of {' and '.join(map(str, sorted(sizes)))} ranks: remove all but one set"
    size = ranks if ranks in sizes else max(sizes, default=0)
    files = {rank: file for file, (rank, of) in found.items() if of == size}
    missing = [rank for rank in range(size) if rank not in files]
    if missing:
        return [], f"next to {path} the file of rank {missing[0]} of {size} is missing"
    return [files[rank] for rank in range(size)], ""


def _read(file: Path) -> list[State]:
    try:
        states: list[State] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    return states
