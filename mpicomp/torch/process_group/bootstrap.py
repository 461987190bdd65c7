"""Meeting of ranks: a store whose address travels over MPI, and MPI communicators of process groups."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

import numpy as np
from mpi4py import MPI
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from collectives import CollectiveTimeout, Communicator
from collectives.communicator.arguments import require_rank
from collectives.consistency.call_check import fingerprint
from collectives.consistency.missing_ranks import list_ranks

CONNECT_SECONDS = 3.0  # for one address of rank 0
ADDRESSES_BYTES = 1024
SIOCGIFADDR = 0x8915  # Linux: the address of an interface

Rendezvous = Iterator[tuple[Store, int, int]]


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


def require_ranks(rank: int, size: int, all_ranks: bool = False) -> None:
    """Raise ValueError unless MPI has started `size` ranks or, without `all_ranks`, more."""
    world = MPI.COMM_WORLD
    if size > world.size or (all_ranks and size != world.size):
        raise ValueError(
            f"rank {rank} of {size}: MPI has started {world.size} rank{'s'[: world.size > 1]} and not {size}: start "
            f"the program by 'mpirun -n {size}' or srun instead of torchrun, or correct WORLD_SIZE"
        )


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
        server = (
            TCPStore("localhost", 0, is_master=True, timeout=timeout, wait_for_workers=False) if not comm.rank else None
        )
        addresses = np.zeros(ADDRESSES_BYTES, np.uint8)
        if server is not None:
            hosts = ["localhost"] if comm.one_node else _own_addresses()
            text = " ".join([str(server.port), *hosts]).encode()[:ADDRESSES_BYTES]
            addresses[: len(text)] = np.frombuffer(text, np.uint8)
        comm.broadcast(addresses)
        port, *hosts = bytes(addresses).rstrip(b"\0").decode().split()
        store = server or TCPStore(_reachable(hosts, int(port)), int(port), is_master=False, timeout=timeout)
        comm.barrier()  # the server must not go before all have connected
    return store


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


def _reachable(hosts: list[str], port: int) -> str:
    """Return the first address that accepts a connection."""
    failures = []
    for host in hosts:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
        except OSError as error:
            failures.append(f"{host}: {error}")
        else:
            return host
    raise ConnectionError(
        f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: the store of rank 0 cannot be reached at port {port} "
        f"({'; '.join(failures)}): set MASTER_ADDR on rank 0 to an address that all machines reach"
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
