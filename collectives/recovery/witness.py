"""Witness of a job's ranks, by which the launcher ends with a failure if all of them die.

A launcher that lets ranks outlive others ends with status 0 where all have been killed. So a process on its node, the
witness, has a connection to each rank: see `collectives.recovery.witness_process`.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from mpi4py import MPI

from collectives.consistency.descriptions import gather_objects
from collectives.recovery import witness_process
from collectives.recovery.launcher_end import own_launcher

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux: IPv4 address of a network interface
_connection: socket.socket | None = None
_was_called = False


class Offer(NamedTuple):
    """Place at which a witness accepts connections.

    Attributes
    ----------
    hosts : list of str
        Addresses of its node.
    port : int
    token : bytes
        First bytes of a connection.
    """

    hosts: list[str]
    port: int
    token: bytes


def call_witness(comm: MPI.Comm, timeout_s: float) -> None:
    """Start the witness of this job, once; collective, over all ranks of the job.

    There is no witness if no rank runs on the launcher's node, or if a rank cannot connect with it.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    global _was_called, _connection
    if _was_called:
        return
    _was_called = True
    launcher = own_launcher()
    beside = gather_objects(comm, bool(launcher), timeout_s)
    if not any(beside):
        return
    mine = _start(launcher, comm.size) if comm.rank == beside.index(True) else None
    offers: list[Offer] = [one for one in gather_objects(comm, mine, timeout_s) if one is not None]
    _connection = _connect(offers[0]) if offers else None
    if not all(gather_objects(comm, _connection is not None, timeout_s)):
        end_by_itself()
        _connection = None


def _start(launcher: int, n_ranks: int) -> Offer | None:
    """Start the witness of a job beside its launcher, whose process is given; None: it cannot be started."""
    token = secrets.token_bytes(16)
    with suppress(OSError, AttributeError):  # AttributeError: this Python has no pidfd_open
        end = os.pidfd_open(launcher)
        with socket.create_server(("", 0), backlog=max(128, n_ranks)) as server:
            given = [str(server.fileno()), str(end), str(n_ranks), token.hex()]
            # Standard output and error are those of this rank, which keeps the launcher waiting.
            subprocess.Popen(
                [sys.executable, "-I", "-S", witness_process.__file__, *given],
                cwd="/", start_new_session=True, stdin=subprocess.DEVNULL, pass_fds=(server.fileno(), end),
            )  # fmt: skip
            os.close(end)
            return Offer(["127.0.0.1", *_addresses()], server.getsockname()[1], token)
    return None


def _connect(offer: Offer) -> socket.socket | None:
    """Connect this rank with the witness for the rest of its life; None: no address of it answers."""
    for host in offer.hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, offer.port), witness_process.CONNECT_S)
            connection.sendall(offer.token)
            if connection.recv(len(offer.token)) == offer.token:  # and no other program of another node's own address
                os.register_at_fork(after_in_child=connection.close)
                return connection
            connection.close()
    return None


def end_by_itself() -> None:
    """Send the witness that this rank comes to its end by itself: the launcher's status is that of the ranks then."""
    if _connection is not None:
        with suppress(OSError):
            _connection.sendall(witness_process.ENDS_BY_ITSELF)


def _addresses() -> Iterator[str]:
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            if not (address := socket.inet_ntoa(found[20:24])).startswith("127."):
                yield address
