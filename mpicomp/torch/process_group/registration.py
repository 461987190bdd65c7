"""Registration of the backend with `torch.distributed`: torchrun's variables, and a store where ranks meet over MPI.

Programs decide by RANK whether to train together, and by LOCAL_RANK which GPU is theirs. ``mpirun`` and ``srun`` set
neither, and a program that finds none trains one model per rank.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, _DistributedBackendOptions
from torch.distributed import Backend, ProcessGroup, distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from collectives import Communicator
from collectives.communicator.arguments import require_rank
from collectives.launcher import place_on_node
from mpicomp.torch.process_group.members import require_ranks
from mpicomp.torch.process_group.mpi_process_group import DEVICES, NAME, MPIProcessGroup

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")  # for env://
_set_here: dict[str, str] = {}
CONNECT_SECONDS = 3.0  # for one address of rank 0
SIOCGIFADDR = 0x8915  # Linux: the address of an interface

Rendezvous = Iterator[tuple[Store, int, int]]


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
        Another backend of this name is registered.
    ValueError
        RANK or WORLD_SIZE contradicts MPI, as where ``torchrun`` has started the program.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.torch import register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> ranks = torch.ones(1)
    >>> torch.distributed.all_reduce(ranks)
    >>> ranks.item() == torch.distributed.get_world_size()
    True
    >>> torch.distributed.destroy_process_group()
    """
    if MPI.Is_initialized():  # not in a child process, which has its parent's variables
        set_variables(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    plugin = Backend._plugins.get(NAME.upper())
    if plugin is not None:
        if plugin.creator_fn is not _create:
            raise RuntimeError(f"another backend is registered as {NAME!r}: register one of the two under another name")
        return
    Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
    _rendezvous_handlers[NAME] = rendezvous_over_mpi
    _rendezvous_handlers["env"] = _or_over_mpi(_rendezvous_handlers["env"])
    original = distributed_c10d.monitored_barrier
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _extended_barrier(original)


def _create(options: _DistributedBackendOptions, group_options: object) -> MPIProcessGroup:
    return MPIProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


def _extended_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """Extend ``torch.distributed.monitored_barrier``, which PyTorch has for Gloo alone, to groups of this backend."""

    @functools.wraps(original)
    def monitored_barrier(
        group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        chosen: object = dist.group.WORLD if group is None else group
        if not isinstance(chosen, MPIProcessGroup):
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
        return chosen.monitored_barrier(limit, wait_all_ranks)

    return monitored_barrier


def _or_over_mpi(original: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    """Extend the handler of ``env://`` to environments that lack a variable: the ranks then meet over MPI."""

    def handler(url: str, **options: object) -> Rendezvous:
        given = {*parse_qs(urlparse(url).query), *(name.lower() for name in VARIABLES if _is_set_by_launcher(name))}
        chosen: Callable[..., Rendezvous] = (
            original if given.issuperset(map(str.lower, VARIABLES)) else rendezvous_over_mpi
        )
        yield from chosen(url, **options)

    return handler


def _is_set_by_launcher(name: str) -> bool:
    value = os.environ.get(name)
    return bool(value) and value != _set_here.get(name)


def set_variables(rank: int, size: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are missing, the last two if they are known.

    Raises
    ------
    ValueError
        RANK or WORLD_SIZE is set, and contradicts MPI's `rank` and `size`.
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
    for name, value in {"RANK": rank, "WORLD_SIZE": size, **place_on_node(environ, size)}.items():
        if not environ.get(name):
            environ[name] = _set_here[name] = str(value)


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}, and must be a whole number: unset it") from None


# Meeting of ranks ----------------------------------------------------------------------------------------------------


def rendezvous_over_mpi(url: str, timeout: timedelta = default_pg_timeout, **_: object) -> Rendezvous:
    """Handle ``mpicomp://``: rank and number of ranks are MPI's, and rank 0 serves a store."""
    require_rank()
    query = parse_qs(urlparse(url).query)
    world = MPI.COMM_WORLD
    rank, size = (
        int(query.get(name.lower(), [os.environ.get(name) or known])[0])
        for name, known in (("RANK", world.rank), ("WORLD_SIZE", world.size))
    )
    require_ranks(rank, size, all_ranks=True)
    yield _store_of_this_time(rank, timeout), rank, size


_served: Store | None = None
_times = 0


def _store_of_this_time(rank: int, timeout: timedelta) -> Store:
    """Return a part of the store that serves all default process groups of this program, one after the other."""
    global _served, _times
    if _served is None:
        _served = _store(rank, timeout)
    _served.set_timeout(timeout)
    _times += 1
    return PrefixStore(f"{_times}", _served)


def _store(rank: int, timeout: timedelta) -> Store:
    """Return a store that rank 0 serves. Raises ValueError on all ranks if two have one RANK."""
    seconds = timeout.total_seconds()
    with Communicator(timeout=seconds, arrival_timeout=seconds) as comm:
        ranks = comm.allgather(np.array([rank])).tolist()
        if sorted(ranks) != list(range(comm.size)):
            raise ValueError(
                f"{comm.here}: RANK is {', '.join(map(str, ranks))} on the ranks of MPI, and must be another one from "
                f"0 to {comm.size - 1} on each: leave RANK unset"
            )
        host, port, listening = _meeting_point(comm)
        descriptor = None if listening is None else listening.detach()  # the store closes it
        # Without a socket of ours it would listen on all interfaces, and it takes commands of anybody who connects.
        store = TCPStore(
            host, port, None, descriptor is not None, timeout, wait_for_workers=False, master_listen_fd=descriptor
        )
        comm.barrier()  # the server must not go before all have connected
    return store


def _meeting_point(comm: Communicator) -> tuple[str, int, socket.socket | None]:
    """Return an address and port of rank 0 that all ranks reach, and on rank 0 the socket that listens there.

    Raises ConnectionError on all ranks if no address is reached by all.
    """
    hosts: list[str] = comm.broadcast_object(["127.0.0.1"] if comm.one_node else _own_addresses())
    for host in hosts:
        listening = None if comm.rank else _listening_socket(host)
        port: int = comm.broadcast_object(listening.getsockname()[1] if listening else 0)
        if comm.allgather(np.array([port > 0 and _is_reachable(host, port)])).all():
            return host, port, listening
        if listening:
            listening.close()
    raise ConnectionError(
        f"{comm.here}: not all ranks reach the store of rank 0 at one of {', '.join(hosts)}: set MASTER_ADDR on rank 0 "
        "to an address of its own that all machines reach"
    )


def _listening_socket(host: str) -> socket.socket | None:
    with suppress(OSError):  # of a name that others have for this machine
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    return None


def _own_addresses() -> list[str]:
    """Return names and addresses by which other machines may reach this one, the likeliest first."""
    name = socket.gethostname()
    found = [os.environ.get("MASTER_ADDR", ""), name]
    with suppress(OSError):
        found += [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, interface in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(query, SIOCGIFADDR, struct.pack("256s", interface.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [one for one in dict.fromkeys(found) if one and not one.startswith("127.")]


def _is_reachable(host: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((host, port), CONNECT_SECONDS).close()
        return True
    return False
