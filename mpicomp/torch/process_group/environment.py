"""The variables of torchrun, by which programs learn that they are one process of several.

Programs decide by RANK whether to train together, and by LOCAL_RANK which GPU is theirs. Under ``mpirun`` and ``srun``
nobody sets them, and a program that finds none trains one model per rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

# Rank and number of ranks on a node, as launchers have them
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH
)
_set_here: dict[str, str] = {}


def set_variables(rank: int, size: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are missing, the last two if they are known.

    Parameters
    ----------
    rank, size : int
        MPI's.
    environ : mapping
        Is changed.

    Raises
    ------
    ValueError
        RANK or WORLD_SIZE is set, and does not go with MPI.
    """
    given = {name: _number(name, environ[name]) for name in ("RANK", "WORLD_SIZE") if environ.get(name)}
    if given.get("WORLD_SIZE", size) != size:
        raise ValueError(
            f"rank {rank} of {size}: WORLD_SIZE is {given['WORLD_SIZE']}, and MPI has started {size} "
            f"rank{'s'[: size > 1]}: start the program by 'mpirun -n {given['WORLD_SIZE']}' or srun instead of "
            "torchrun, or unset RANK and WORLD_SIZE"
        )
    if not 0 <= given.get("RANK", rank) < size:
        raise ValueError(
            f"rank {rank} of {size}: RANK is {given['RANK']}, and must lie in 0 .. {size - 1}: unset RANK and "
            "WORLD_SIZE"
        )
    for name, value in {"RANK": rank, "WORLD_SIZE": size, **_on_node(environ, size)}.items():
        if not environ.get(name):
            environ[name] = _set_here[name] = str(value)


def set_by_launcher(name: str) -> bool:
    """Return True if a variable is set, and not by `set_variables`."""
    value = os.environ.get(name)
    return bool(value) and value != _set_here.get(name)


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}, and must be a whole number: unset it") from None


def _on_node(environ: Mapping[str, str], size: int) -> dict[str, int]:
    """LOCAL_RANK and LOCAL_WORLD_SIZE, as far as they are known without communication."""
    if size == 1:
        return {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for rank_name, size_name in _LAUNCHERS:
        if environ.get(rank_name, "").isdecimal() and environ.get(size_name, "").isdecimal():
            return {"LOCAL_RANK": int(environ[rank_name]), "LOCAL_WORLD_SIZE": int(environ[size_name])}
    if not environ.get("SLURM_LOCALID", "").isdecimal():
        return {}
    tasks = _tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    known = {"LOCAL_WORLD_SIZE": tasks[int(node)]} if node.isdecimal() and int(node) < len(tasks) else {}
    return {"LOCAL_RANK": int(environ["SLURM_LOCALID"]), **known}


def _tasks_of_nodes(text: str) -> list[int]:
    """The numbers of tasks of all nodes, which Slurm writes as ``2(x3),1``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]
