"""Exchanges of frameworks over a communicator that regroups, in place of their process group, which keeps dead ranks.

These are metrics, decisions and paths of files. Sums and rows are those of the survivors.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from torch import Tensor

from collectives import Communicator
from collectives.recovery.fault_tolerance import repeat_after_deaths

OnFailure = Literal["raise", "regroup"]


def open_communicator(comm: Communicator | None, on_failure: OnFailure, algorithm: object) -> Communicator:
    """Return the communicator of a framework: the one that is given, or one of its own; collective.

    Raises
    ------
    ValueError
        A communicator is given together with an option of its own, or ranks regroup without a method.
    """
    if comm is not None and on_failure != "raise":
        raise ValueError(f"on_failure={on_failure!r} is an option of comm: pass it to mpicomp.Communicator")
    found = Communicator(on_failure=on_failure) if comm is None else comm
    if found.regroup is not None and algorithm is None:
        raise ValueError(
            "on_failure='regroup' needs an algorithm, such as mpicomp.Dense(): without one PyTorch averages over its "
            "process group, which does not outlive its ranks"
        )
    return found


def gather_rows(comm: Communicator, tensor: Tensor) -> Tensor:
    """Return the ranks' tensors, which have one shape, as rows; collective."""
    rows: Tensor = comm.allgather(tensor.detach().contiguous()[None])
    return rows


def reduce_rows(comm: Communicator, tensor: Tensor, op: object) -> Tensor:
    """Return the sum, mean, minimum or maximum of the ranks' tensors; collective.

    op : name of the operation, or an operation of `torch.distributed`
    """
    rows, name = gather_rows(comm, tensor), re.findall("[a-z]+", str(op).lower())[-1]
    if name in ("mean", "avg"):
        return rows.double().mean(0).to(tensor.dtype)
    reduced = rows.sum(0) if name == "sum" else rows.amin(0) if name == "min" else rows.amax(0)
    return reduced.to(tensor.dtype)


def broadcast_from(comm: Communicator, value: object, source: int) -> Any:
    """Return the object of a rank, by its number at the start, or of the first survivor if it has died; collective."""

    def broadcast() -> Any:
        return comm.broadcast_object(value, comm.members.index(source) if source in comm.members else 0)

    return repeat_after_deaths(broadcast)
