"""Members of a process group: the ranks that MPI has started, and an MPI communicator of those that make a group."""

from __future__ import annotations

from datetime import timedelta

from mpi4py import MPI
from torch._C._distributed_c10d import Store

from collectives import CollectiveTimeout
from collectives.consistency.descriptions import fingerprint
from collectives.quoting import list_ranks


def require_ranks(rank: int, size: int, all_ranks: bool = False) -> None:
    """Raise ValueError unless MPI has started `size` ranks or, without `all_ranks`, more."""
    world = MPI.COMM_WORLD
    if size > world.size or (all_ranks and size != world.size):
        raise ValueError(
            f"rank {rank} of {size}: MPI has started {world.size} rank{'s'[: world.size > 1]} and not {size}: start "
            f"the program by 'mpirun -n {size}' or srun instead of torchrun, or correct WORLD_SIZE"
        )


def communicator_of(store: Store, rank: int, size: int, timeout: timedelta, name: str) -> MPI.Intracomm:
    """Return an MPI communicator of the members of a process group, in the group's order; they alone make it.

    The store and the name are those of the group, and `timeout` is the time that members wait for each other.

    Raises
    ------
    CollectiveTimeout
        Some members have not come; the error names them.
    ValueError
        MPI has started fewer ranks.
    """
    require_ranks(rank, size)
    store.set(f"mpi/{rank}", str(MPI.COMM_WORLD.rank))
    keys = [f"mpi/{one}" for one in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [one for one, key in enumerate(keys) if not store.check([key])]
        raise CollectiveTimeout(
            f"rank {rank} of {size}: not all ranks make this process group after {timeout.total_seconds():g} s; "
            f"nothing from {list_ranks(missing)} (look for one that stopped or took another branch)"
        ) from error
    ranks = [int(store.get(key)) for key in keys]
    if len(set(ranks)) < size:
        raise ValueError(
            f"rank {rank} of {size}: several members are rank {ranks[0]} of MPI: start all ranks by one mpirun or srun"
        )
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(ranks), fingerprint(name) % (1 << 15))
