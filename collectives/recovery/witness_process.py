"""The witness: a process that ends the launcher of a job if all ranks have died, or names the first rank that dies.

A rank that comes to its end by itself sends a byte before. If all connections end without one, the witness ends the
launcher, whose status is then 1. The launcher waits for that: it reads the output of its ranks to the end, and the
witness has that of one. The process runs this very file, without any package.

MPICH's launcher kills all other ranks after a death, and may report one of these in place of the first. So its witness
prints the rank whose connection ends first, and leaves the launcher alone.

The rank that starts it writes the token of connections to its standard input, and then `KEPT` once all ranks have
connected. If it ends without, so does the witness.

Once all ranks have ended, and it holds no output any more, the witness becomes the process that ends a launcher which
hangs: see `collectives.recovery.launcher_end`.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

CONNECT_S = 3.0  # longest wait for the answer of a connection
TOKEN_BYTES, NAME_BYTES = 16, 200  # of a connection's first message: the rank in words follows the token
CONFIRMS, ENDS_BY_ITSELF, KEPT = b"c", b"e", b"k"
_LIVELINESS = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
_ENDING_S = 2.0  # in which a launcher ends that has killed the ranks itself, and reads no output to the end
_STARTER = 0  # standard input


def keep_alive(connection: socket.socket) -> None:
    """Let a connection end if the other node is gone, and keep firewalls from forgetting it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _LIVELINESS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Witness:
    """The ranks whose connections are open."""

    def __init__(self, server: socket.socket, launcher: int, n_ranks: int) -> None:
        self._server, self._launcher, self._n_ranks = server, launcher, n_ranks
        self._token = os.read(_STARTER, TOKEN_BYTES)
        # It reports connections in the order in which they end, and `select.poll` in that of their numbers. The system
        # closes the newest descriptor of a dead process first: this connection before that to MPICH's launcher.
        self._poll = select.epoll()
        self._unknown: dict[int, socket.socket] = {}  # connections without a token as yet
        self._answered: dict[int, tuple[socket.socket, str]] = {}  # whose ranks may have given up to wait
        self._ranks: dict[int, tuple[socket.socket, str]] = {}
        self._is_kept = False
        for number in (_STARTER, launcher, server.fileno()):
            self._poll.register(number, select.POLLIN)

    def deaths(self) -> Iterator[str]:
        """Yield each rank that dies, until a rank comes to its end by itself or the launcher has ended."""
        while True:
            for number, _ in self._poll.poll():
                if number == self._launcher:
                    return
                if number == _STARTER:
                    if not self._keep():
                        return
                elif number == self._server.fileno():
                    self._accept()
                elif number in self._unknown:
                    self._recognize(number)
                elif number in self._answered:
                    self._confirm(number)
                else:
                    connection, name = self._ranks.pop(number)
                    if self._ends_by_itself(connection):
                        return
                    yield name

    def await_ranks(self) -> bool:
        """Wait until all ranks have ended; return False where the launcher has, or where there is no witness."""
        self._stop_accepting()
        while self._ranks or not self._is_kept:
            for number, _ in self._poll.poll():
                if number == self._launcher or (number == _STARTER and not self._keep()):
                    return False
                if number in self._ranks:
                    self._ends_by_itself(self._ranks.pop(number)[0])
        return True

    def _keep(self) -> bool:
        self._is_kept = os.read(_STARTER, 1) == KEPT
        if self._is_kept:
            self._poll.unregister(_STARTER)
        return self._is_kept

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            keep_alive(connection)
            self._unknown[connection.fileno()] = connection
            self._poll.register(connection, select.POLLIN)

    def _recognize(self, number: int) -> None:
        connection = self._unknown.pop(number)
        with suppress(OSError):
            received = connection.recv(TOKEN_BYTES + NAME_BYTES, socket.MSG_DONTWAIT)
            if secrets.compare_digest(received[:TOKEN_BYTES], self._token):
                connection.sendall(self._token)
                self._answered[number] = connection, received[TOKEN_BYTES:].decode(errors="replace")
                return
        self._forget(connection)

    def _confirm(self, number: int) -> None:
        connection, name = self._answered.pop(number)
        with suppress(OSError):
            if connection.recv(1) == CONFIRMS:
                self._ranks[number] = connection, name
                if len(self._ranks) == self._n_ranks:
                    self._stop_accepting()
                return
        self._forget(connection)

    def _stop_accepting(self) -> None:
        if self._server.fileno() < 0:
            return
        for connection in (*self._unknown.values(), *(one for one, _ in self._answered.values())):
            self._forget(connection)
        self._unknown.clear()
        self._answered.clear()
        self._poll.unregister(self._server)
        self._server.close()

    def _ends_by_itself(self, connection: socket.socket) -> bool:
        received = b""
        with suppress(OSError):  # of a node that is gone
            received = connection.recv(1)
        self._forget(connection)
        return received == ENDS_BY_ITSELF

    def _forget(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        connection.close()


def _main(server: socket.socket, launcher: int, n_ranks: int, most_deaths: int, ending: list[str]) -> None:
    if os.fork():  # the rank waits for this process alone
        return
    witness = _Witness(server, launcher, n_ranks)
    dead = [*islice(witness.deaths(), most_deaths)]
    if dead and most_deaths < n_ranks:
        print(f"{dead[0]} died first, and MPICH ended the others: start from the last checkpoint", file=sys.stderr)
    elif len(dead) == n_ranks and not select.select([launcher], [], [], _ENDING_S)[0]:
        who = f"all {n_ranks} ranks have" if n_ranks > 1 else "the only rank has"
        print(f"{who} died, so that the job ends with status 1", file=sys.stderr, flush=True)
        signal.pidfd_send_signal(launcher, signal.SIGTERM)
        select.select([launcher], [], [], _ENDING_S)  # the end of the output must not come before the signal
    if ending:
        nothing = os.open(os.devnull, os.O_RDWR)
        for output in (1, 2):  # which the launcher reads to their end
            os.dup2(nothing, output)
        if witness.await_ranks():
            os.execv(ending[0], ending)


if __name__ == "__main__":
    server, launcher, n_ranks, most_deaths = map(int, sys.argv[1:5])
    _main(socket.socket(fileno=server), launcher, n_ranks, most_deaths, sys.argv[5:])
