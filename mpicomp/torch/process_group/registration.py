"""How `torch.distributed` comes to know the backend."""

from __future__ import annotations

from typing import Any

from torch.distributed import Backend
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from mpicomp.torch.process_group.bootstrap import or_from_environment, over_mpi
from mpicomp.torch.process_group.group import DEVICES, NAME, MPIProcessGroup


def register_backend() -> None:
    """Make ``torch.distributed.init_process_group("mpicomp")`` work; registering again does nothing.

    Where not all of MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are set, `init_process_group` then takes rank and
    number of ranks from MPI, and makes a store whose address travels over MPI. This needs no call of MPI before
    `init_process_group`.

    Raises
    ------
    RuntimeError
        Something else has registered a backend of this name.
    """
    plugin = Backend._plugins.get(NAME.upper())
    if plugin is not None:
        if plugin.creator_fn is not _create:
            raise RuntimeError(f"another backend is registered as {NAME!r}: register one of the two under another name")
        return
    Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    register_rendezvous_handler(NAME, over_mpi)  # type: ignore[no-untyped-call]
    _rendezvous_handlers["env"] = or_from_environment(_rendezvous_handlers["env"])


def _create(options: Any, group_options: Any) -> MPIProcessGroup:
    """Make a process group, on its members alone."""
    return MPIProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)
