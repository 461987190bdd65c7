"""How `torch.distributed` comes to know the backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import Backend, distributed_c10d
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from mpicomp.torch.process_group.bootstrap import or_from_environment, over_mpi
from mpicomp.torch.process_group.environment import set_variables
from mpicomp.torch.process_group.group import DEVICES, NAME, MPIProcessGroup


def register_backend() -> None:
    """Make ``torch.distributed.init_process_group("mpicomp")`` work; registering again does nothing.

    Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are missing, as ``torchrun`` would. So call this
    before a program looks at them, which may otherwise train one model per rank. The last two stay unset where the
    launcher does not provide them. Where not all of MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE were set before,
    `init_process_group` makes a store whose address travels over MPI. This needs no call of MPI before
    `init_process_group`. Also makes ``torch.distributed.monitored_barrier`` take groups of this backend.

    Raises
    ------
    RuntimeError
        Something else has registered a backend of this name.
    ValueError
        RANK or WORLD_SIZE contradicts MPI, as where ``torchrun`` has started the program.
    """
    if MPI.Is_initialized():  # not in a child process, which has its parent's variables
        set_variables(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    plugin = Backend._plugins.get(NAME.upper())
    if plugin is not None:
        if plugin.creator_fn is not _create:
            raise RuntimeError(f"another backend is registered as {NAME!r}: register one of the two under another name")
        return
    Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    register_rendezvous_handler(NAME, over_mpi)  # type: ignore[no-untyped-call]
    original = distributed_c10d.monitored_barrier
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _or_of_groups_over_mpi(original)
    _rendezvous_handlers["env"] = or_from_environment(_rendezvous_handlers["env"])


def _or_of_groups_over_mpi(original: Callable[..., None]) -> Callable[..., None]:
    """Extend ``torch.distributed.monitored_barrier``, which PyTorch has for Gloo alone, to groups of this backend."""

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, MPIProcessGroup):
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks)

    return monitored_barrier


def _create(options: Any, group_options: Any) -> MPIProcessGroup:
    """Make a process group, on its members alone."""
    return MPIProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)
