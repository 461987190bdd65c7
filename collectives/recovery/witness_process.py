"""The witness: a process that ends the launcher of a job if all ranks have died.

A rank that comes to its end by itself sends a byte before. If all connections end without one, the witness ends the
launcher, whose status is then 1. The launcher waits for that: it reads the output of its ranks to the end, and the
witness has that of one. The process runs this very file, without any package.
"""

from __future__ import annotations

import secrets
import select
import signal
import socket
import sys
from contextlib import suppress

CONNECT_S = 5.0  # longest wait for the answer of a connection
ENDS_BY_ITSELF = b"e"
_ENDING_S = 0.5  # in which a launcher ends that has killed the ranks itself, and reads no output to the end
_PATIENCE_S = 60.0  # for ranks to connect


def _main(server: socket.socket, launcher: int, n_ranks: int, token: bytes) -> None:
    ranks = _accept(server, n_ranks, token)
    server.close()
    poll = select.poll()
    by_number = {one.fileno(): one for one in ranks}
    for number in (launcher, *by_number):
        poll.register(number, select.POLLIN)
    while by_number:
        for number, _ in poll.poll():
            if number == launcher:
                return
            received = b""
            with suppress(ConnectionError):  # of a node that is gone
                received = by_number[number].recv(1)
            if received == ENDS_BY_ITSELF:
                return
            poll.unregister(number)
            by_number.pop(number).close()
    if poll.poll(1e3 * _ENDING_S):
        return
    who = f"all {n_ranks} ranks have" if n_ranks > 1 else "the only rank has"
    print(f"{who} died, so that the job ends with status 1", file=sys.stderr, flush=True)
    signal.pidfd_send_signal(launcher, signal.SIGTERM)


def _accept(server: socket.socket, n_ranks: int, token: bytes) -> list[socket.socket]:
    ranks: list[socket.socket] = []
    server.settimeout(_PATIENCE_S)
    while len(ranks) < n_ranks:
        connection, _ = server.accept()
        connection.settimeout(CONNECT_S)
        with suppress(OSError):
            if secrets.compare_digest(connection.recv(len(token), socket.MSG_WAITALL), token):
                connection.sendall(token)
                ranks.append(connection)
                continue
        connection.close()
    return ranks


if __name__ == "__main__":
    with suppress(TimeoutError):  # not all ranks can connect
        _main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
