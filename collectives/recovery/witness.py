"""Witness of a job's ranks, by which the launcher ends with a failure if all of them die.

A launcher that lets ranks outlive others ends with status 0 where all have been killed. MPICH's kills all other ranks
after a death, so that none can name the dead one. So a process on the launcher's node, the witness, has a connection to
each rank: see `collectives.recovery.witness_process`.
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
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

from mpi4py import MPI

from collectives.consistency.descriptions import gather_objects
from collectives.recovery import witness_process
from collectives.recovery.fault_tolerance import is_tolerant_job
from collectives.recovery.launcher_end import LAUNCHERS, MPICH_PROXY, OF_ENDED_RANKS, own_launcher, patience_s
from collectives.recovery.launcher_end import command as launcher_end

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
        First bytes of a connection, and of the answer.
    """

    hosts: list[str]
    port: int
    token: bytes


def call_witness(comm: MPI.Comm, timeout_s: float) -> None:
    """Start the witness of this job, once; collective, over all ranks of the job.

    Ranks that all end with the first have one under MPICH's launcher alone: others report the dead rank themselves.
    The job has no witness if no rank runs on the launcher's node, if a rank cannot connect with it, or if the ranks of
    another job have started this one, whose launcher it is too.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    global _was_called, _connection
    if _was_called:
        return
    _was_called = True
    n_deaths, launchers = (comm.size, LAUNCHERS) if is_tolerant_job() else (1, MPICH_PROXY)
    launcher = 0 if MPI.Comm.Get_parent() else own_launcher(launchers)
    beside = gather_objects(comm, bool(launcher), timeout_s)
    if not any(beside):
        return
    with _Starter() as starter:
        mine = starter.start(launcher, comm.size, n_deaths) if comm.rank == beside.index(True) else None
        offers: list[Offer] = [one for one in gather_objects(comm, mine, timeout_s) if one is not None]
        connection = _connect(offers[0]) if offers else None
        if all(gather_objects(comm, connection is not None, timeout_s)):
            starter.keep()
            _connection = connection
            os.register_at_fork(after_in_child=_close)
        elif connection is not None:
            connection.close()


def end_by_itself() -> None:
    """Send the witness that this rank comes to its end by itself: the launcher's status is that of the ranks then."""
    global _connection
    connection, _connection = _connection, None
    if connection is not None:
        with connection, suppress(OSError):
            connection.send(witness_process.ENDS_BY_ITSELF, socket.MSG_NOSIGNAL)


class _Starter:
    """Start of the witness by one rank, which ends it unless `keep` is called within the block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            with suppress(OSError):
                self._process.communicate()  # closes its input; it has left the witness behind, and ends

    def start(self, launcher: int, n_ranks: int, n_deaths: int) -> Offer | None:
        """Start the witness of a launcher, whose process is given, until so many deaths; None: it cannot be started."""
        token = secrets.token_bytes(witness_process.TOKEN_BYTES)
        with suppress(OSError, AttributeError), ExitStack() as files:  # AttributeError: Python has no pidfd_open here
            end = os.pidfd_open(launcher)
            files.callback(os.close, end)
            server = files.enter_context(socket.create_server(("", 0), backlog=max(128, n_ranks)))
            patience = patience_s() if n_deaths == n_ranks else 0
            ending = launcher_end(patience, OF_ENDED_RANKS, [(launcher, end)]) if patience else []
            numbers = map(str, (server.fileno(), end, n_ranks, n_deaths))
            # Standard output and error are those of this rank, which keeps the launcher waiting.
            self._process = subprocess.Popen(
                [sys.executable, "-IS", witness_process.__file__, *numbers, *ending],
                cwd="/", start_new_session=True, stdin=subprocess.PIPE, pass_fds=(server.fileno(), end),
            )  # fmt: skip
            self._write(token)
            return Offer(["127.0.0.1", *_addresses()], server.getsockname()[1], token)
        return None

    def keep(self) -> None:
        """Let the witness stay: all ranks have connected."""
        if self._process is not None:
            with suppress(OSError):
                self._write(witness_process.KEPT)

    def _write(self, given: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(given)
        self._process.stdin.flush()


def _connect(offer: Offer) -> socket.socket | None:
    """Connect this rank with the witness for the rest of its life; None: no address of it answers."""
    name = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} (process {os.getpid()} on {socket.gethostname()})"
    for host in offer.hosts:
        with suppress(OSError):
            connection = socket.create_connection((host, offer.port), witness_process.CONNECT_S)
            witness_process.keep_alive(connection)
            connection.sendall(offer.token + name.encode())
            if connection.recv(len(offer.token)) == offer.token:  # and no other program of another node's own address
                connection.sendall(witness_process.CONFIRMS)
                return connection
            connection.close()
    return None


def _close() -> None:
    """Close the connection in a process that is forked from this rank, whose end the witness would miss."""
    if _connection is not None:
        _connection.close()


def _addresses() -> Iterator[str]:
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            if not (address := socket.inet_ntoa(found[20:24])).startswith("127."):
                yield address
