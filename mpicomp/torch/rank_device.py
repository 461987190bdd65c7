"""Device of a rank: a GPU that no other rank of its node has, or the CPU where no rank finds a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from collectives import Communicator
from collectives.quoting import list_ranks, one_line
from mpicomp.aggregator.arguments import require_communicator

_CURE = "start a rank for each GPU, as mpicomp run --gpus does"


class _Found(NamedTuple):
    """Number of GPUs that a rank finds, and the one that it takes: its name, and a text that no other GPU has.

    Without a name the text is the problem.
    """

    n_gpus: int
    name: str = ""
    identity: str = ""


def local_device(comm: Communicator) -> torch.device:
    """Return this rank's device, which becomes PyTorch's current one: a GPU of its own, or the CPU. Collective.

    Call it before models and process groups are made. A rank takes the GPU with its number on its node, or the only one
    that it finds, as ``srun --gpus-per-task=1`` hides the others.

    Parameters
    ----------
    comm : Communicator
        All ranks that train together.

    Returns
    -------
    torch.device
        As in ``torch.device("cuda", 3)``; ``torch.device("cpu")`` where no rank finds a GPU.

    Raises
    ------
    ValueError
        A rank has no GPU, and another one has; two ranks have the same GPU; or a node has more ranks than GPUs. On all
        ranks, with the first that lacks one.

    Examples
    --------
    >>> import mpicomp
    >>> from mpicomp.torch import local_device
    >>> with mpicomp.Communicator() as comm:
    ...     device = local_device(comm)
    >>> device.type in ("cpu", "cuda")
    True
    """
    require_communicator(comm, "local_device", "local_device(comm)")
    found = comm.allgather_object(_look(comm.local_rank))
    problem = _problem([_Found(*one) for one in found])
    if problem:
        raise ValueError(f"{comm.here}, local_device: {problem}")
    name = found[comm.rank][1]
    return torch.device(name or "cpu")


def _look(local_rank: int) -> tuple[int, str, str]:
    """Take the GPU of a rank with this number on its node, and describe it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if count == 1 else local_rank
    if index >= count:
        return _Found(count, "", f"number {index} is not among the {count} that it finds: {_CURE}")
    try:
        torch.cuda.set_device(index)
        identity = getattr(torch.cuda.get_device_properties(index), "uuid", "")
        return _Found(count, f"cuda:{index}", str(identity))
    except Exception as error:  # noqa: BLE001 - of a GPU that another program has for itself; raised on all ranks
        return _Found(count, "", f"cuda:{index} cannot be used ({one_line(error)})")


def _problem(found: list[_Found]) -> str:
    """Return the reason for which the ranks cannot train on these devices, or ""."""
    if not any(one.n_gpus for one in found):
        return ""
    blind = [rank for rank, one in enumerate(found) if not one.n_gpus]
    if blind:
        first = next(one.name for one in found if one.name)
        return (
            f"no GPU is found on {list_ranks(blind)}, and other ranks find some, such as {first}: models train on one "
            "kind of device"
        )
    users: dict[str, int] = {}
    for rank, one in enumerate(found):
        if not one.name:
            return f"rank {rank} has no GPU of its own, {one.identity}"
        other = users.setdefault(one.identity or f"rank {rank}", rank)
        if other != rank:
            return f"ranks {other} and {rank} have the same GPU, {one.name}: {_CURE}"
    return ""
