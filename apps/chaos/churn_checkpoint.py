"""Checkpoints of a training whose ranks may die while they write one: each is whole, or is not taken.

The folder ``step-00000120`` has a file of each rank, and ``manifest.json`` with the ranks that wrote theirs. A rank
writes the manifest once all ranks have written their files, as members of the same group.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, TypeAlias

import torch

from apps.records import read_record, write_record
from collectives import Communicator
from collectives.atomic_file import replacing
from mpicomp.torch import redistribute_states

State: TypeAlias = dict[str, Any]
MANIFEST, KEPT = "manifest.json", 2


def write_checkpoint(folder: Path, comm: Communicator, step: int, states: tuple[State, State]) -> None:
    """Write the checkpoint of a step, a model's and an optimizer's state, unless a rank dies meanwhile; collective."""
    target, members = folder / f"step-{step:08d}", comm.members
    target.mkdir(parents=True, exist_ok=True)
    number = members[comm.rank]
    with replacing(target / f"rank-{number}.pt") as file:
        torch.save(states, file)
    views = comm.allgather_object(members)  # a barrier, too: all files are written
    # a rank may notice a death one call later than another, and then their states are of different groups
    if comm.rank == 0 and views == [members] * len(members):
        write_record(target / MANIFEST, {"step": step, "members": list(members)})
        for old in checkpoints(folder)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a folder, the oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{MANIFEST}"))


def read_checkpoint(path: Path, rank: int, ranks: int) -> tuple[State, State, int]:
    """Return the model, the optimizer's state for one of so many ranks, and the number of steps made."""
    record = read_record(path / MANIFEST, step=int, members=list)
    members = record["members"]
    if len(members) == ranks:
        model, state = _read(path, members[rank])
    else:
        found = [_read(path, member) for member in members]
        model, state = found[0][0], redistribute_states([state for _, state in found], ranks)[rank]
    return model, state, record["step"]


def _read(path: Path, member: int) -> tuple[State, State]:
    model, state = torch.load(path / f"rank-{member}.pt", weights_only=False)
    return model, state
