"""A file for each rank next to a checkpoint that a framework writes, with the states of its hooks and optimizers.

Frameworks save the state of rank 0. Residuals, and under "updates" moments too, differ between ranks.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from collectives import Communicator
from collectives.atomic_file import replacing
from collectives.recovery.fault_tolerance import repeat_after_deaths
from collectives.regular_file import open_regular
from mpicomp.torch.state.redistribution import redistribute_states
from mpicomp.torch.state.schema import State
from mpicomp.torch.state.step_folder import Stateful, on_all_ranks


def save_beside(path: Path, owners: Sequence[Stateful], comm: Communicator) -> None:
    """Write this rank's file ``PATH.rankR-of-N``, and remove those of other numbers of ranks; collective."""
    save = repeat_after_deaths(lambda: comm.broadcast_object(secrets.token_hex(8)))  # which files belong together
    file = path.with_name(f"{path.name}.rank{comm.rank}-of-{comm.size}")

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            torch.save({"save": save, "states": [owner.state_dict() for owner in owners]}, stream)

    here = f"the states of ranks next to {path} cannot be written: {comm.here}"
    on_all_ranks(comm.allgather_object, here, OSError, write)
    if comm.rank == 0:
        with suppress(OSError):  # `load_beside` refuses files that stay
            for other, (_, size) in _files(path).items():
                if size != comm.size:
                    other.unlink(missing_ok=True)


def load_beside(path: Path, owners: Sequence[Stateful], comm: Communicator) -> bool:
    """Restore the states in the files of `save_beside`, also on another number of ranks; collective.

    Returns
    -------
    bool
        False on all ranks: no rank has written a file.

    Raises
    ------
    ValueError
        Files of some ranks are missing, or they were not written together: on all ranks. A state does not fit: the
        other ranks then raise CollectiveMismatch.
    """
    files = on_all_ranks(comm.allgather_object, comm.here, ValueError, lambda: _complete_set(path))
    if len(set(comm.allgather_object(len(files)))) > 1:
        raise ValueError(
            f"{comm.here}: not all ranks see the files next to {path}: checkpoints must be in a folder of all nodes"
        )
    if not files:
        return False
    with comm.refusing("restoring the states of ranks", OSError, ValueError, where=comm.here):
        if len(files) == comm.size:
            save, states = _read(files[comm.rank])
            saves = {save}
        else:
            read = [_read(file) for file in files]
            saves = {save for save, _ in read}
            states = []
            if len(saves) == 1:  # others may not fit together
                by_rank = [states for _, states in read]
                states = [redistribute_states(group, comm.size)[comm.rank] for group in zip(*by_rank, strict=True)]
        if len(states) != len(owners) and len(saves) == 1:
            raise ValueError(f"{files[0]} has {len(states)} states, and there are {len(owners)} to restore")
    if len(set().union(*comm.allgather_object(saves))) > 1:
        raise ValueError(
            f"{comm.here}: the states of ranks next to {path} were not written together, as after a save that was "
            "interrupted: resume from another checkpoint, or remove them to start from residuals of zero"
        )
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


def _complete_set(path: Path) -> list[Path]:
    """Return the files of all ranks that wrote them, in rank order; ValueError if they are no single set."""
    found = _files(path)
    sizes = {size for _, size in found.values()}
    if len(sizes) > 1:
        numbers = " and ".join(map(str, sorted(sizes)))
        raise ValueError(f"next to {path} are states of {numbers} ranks: remove all but one set")
    size = max(sizes, default=0)
    files = {rank: file for file, (rank, _) in found.items()}
    missing = [rank for rank in range(size) if rank not in files]
    if missing:
        raise ValueError(f"next to {path} the file of rank {missing[0]} of {size} is missing")
    return [files[rank] for rank in range(size)]


def _read(file: Path) -> tuple[str, list[State]]:
    """Return the mark of the save, which is empty in files of earlier versions, and the states."""
    try:
        with open_regular(file) as opened:
            read = torch.load(opened, map_location="cpu", weights_only=True)
        return ("", read) if isinstance(read, list) else (read["save"], read["states"])
    except Exception as error:
        # PyTorch seeks to places that a damaged file names, for which the system's error is EINVAL
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error})") from error
