"""Exchanges of frameworks over a communicator that regroups, in place of their process group, which keeps dead ranks.

These are metrics, decisions and paths of files. Sums and rows are those of the survivors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from collectives import Communicator
from collectives.quoting import shown
from collectives.recovery.fault_tolerance import repeat_after_deaths

OnFailure = Literal["raise", "regroup"]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "mean": lambda rows: rows.double().mean(0),
    "avg": lambda rows: rows.double().mean(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}


def open_communicator(comm: Communicator | None, on_failure: OnFailure, algorithm: object) -> Communicator:
    """Return the communicator of a framework: the one that is given, or one of its own; collective.

    Raises
    ------
    ValueError
        A communicator is given together with an option of its own, or ranks regroup without a method.
    """
    if comm is not None and on_failure != "raise":
        raise ValueError(f"on_failure={on_failure!r} is an option of comm: pass it to mpicomp.Communicator")
    regroups = on_failure == "regroup" if comm is None else comm.recovery is not None
    if regroups and algorithm is None:  # refused before a communicator is made, which nobody would close
        raise ValueError(
            "on_failure='regroup' needs an algorithm, such as mpicomp.Dense(): without one PyTorch averages over its "
            "process group, which does not outlive its ranks"
        )
    return Communicator(on_failure=on_failure) if comm is None else comm


def gather_rows(comm: Communicator, tensor: Tensor) -> Tensor:
    """Return the ranks' tensors, which have one shape, as rows; collective."""
    rows: Tensor = comm.allgather(tensor.detach().contiguous()[None])
    return rows


def reduce_rows(comm: Communicator, tensor: Tensor, op: object) -> Tensor:
    """Return the sum, mean, minimum or maximum of the ranks' tensors; collective.

    op : name of the operation, or an operation of `torch.distributed`

    Raises
    ------
    ValueError
        The operation is another one.
    """
    name = re.findall("[a-z_]+", f"none {op}".lower())[-1]  # str(ReduceOp.SUM) is "<RedOpType.SUM: 0>"
    if name not in _REDUCTIONS:
        raise ValueError(f"{comm.here}: survivors of a death have no reduction {shown(op)}: {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name](gather_rows(comm, tensor)).to(tensor.dtype)


def broadcast_from(comm: Communicator, value: object, source: int) -> Any:
    """Return the object of a rank, by its number at the start, or of the first survivor if it has died; collective."""

    def broadcast() -> Any:
        return comm.broadcast_object(value, comm.members.index(source) if source in comm.members else 0)

    return repeat_after_deaths(broadcast)
