"""Ranks that start within milliseconds: copies of a process that has loaded all modules and the compiler.

``python -m apps.chaos.warm SOCKET MODULE ...`` is the server. The launcher of MPI starts `_STUB` as each rank, which
passes its environment, namespaces and outputs to the server. The server forks; the copy connects to MPI in the name of
the stub and runs a program. The stub ends as the copy does, by the same signal or with the same status, and the copy
ends with the stub.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.launch import PROJECT, JobFailed
from collectives.recovery.launcher_end import LAUNCHERS, OF_ENDED_RANKS, command, patience_s

LONGEST_REQUEST = 1 << 20
_STUB = """
import json, os, signal, socket, struct, sys
to = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
to.connect(sys.argv[1])
request = {"arguments": sys.argv[2:], "env": dict(os.environ), "pid": os.getpid()}
to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
socket.send_fds(to, [json.dumps(request).encode()], [1, 2])
status = struct.unpack("i", to.recv(4))[0]
if os.WIFSIGNALED(status):
    os.kill(os.getpid(), os.WTERMSIG(status))
    signal.pause()
sys.exit(os.WEXITSTATUS(status))
"""


class WarmRanks:
    """The server, as a process that ends with this one; its socket is in `folder`."""

    def __init__(self, folder: Path, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._stub, self._socket = folder / "stub.py", folder / "socket"
        self._stub.write_text(_STUB)
        # loads the modules before the first copy is made; copies have the environment of their stubs
        self._server = subprocess.Popen(
            [sys.executable, "-m", "apps.chaos.warm", str(self._socket), *modules], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, cwd=PROJECT,
            env={**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"ready\n":
            raise JobFailed("the process from which ranks are copied has not started; its error is above")

    def command(self, program: Path, arguments: Sequence[str]) -> list[str]:
        """Return the command of one rank, for the launcher."""
        return [sys.executable, "-S", "-E", str(self._stub), str(self._socket), str(program), *arguments]

    def close(self) -> None:
        """End the server and the copies that still run."""
        self._server.communicate()


def serve(path: str) -> dict[str, Any] | None:
    """Fork a copy for each request. Returns None in the server, at its end, and the request in each copy."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)
    print("ready", flush=True)
    stubs: dict[int, socket.socket] = {}  # by the process of the copy
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None and key.data not in stubs:
                    continue  # the end of this copy was the event before
                if key.fileobj is sys.stdin:  # the campaign has ended
                    for pid in stubs:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is listening:
                    stub, _ = listening.accept()
                    message, outputs, _, _ = socket.recv_fds(stub, LONGEST_REQUEST, 2)
                    if not message:
                        stub.close()
                        continue
                    request = json.loads(message)
                    pid = os.fork()
                    if pid == 0:
                        selector.close()
                        for one in (listening, stub, *stubs.values()):
                            one.close()
                        return _become_rank(request, outputs)
                    if int(request["env"].get("OMPI_COMM_WORLD_LOCAL_RANK", 1)) == 0:
                        _watch_launcher_of(request["pid"])
                    for output in outputs:
                        os.close(output)
                    stubs[pid] = stub
                    selector.register(stub, selectors.EVENT_READ, pid)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                elif isinstance(key.fileobj, socket.socket):  # the launcher has ended the stub
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
                else:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    stub, status = stubs.pop(key.data), os.waitpid(key.data, 0)[1]
                    with contextlib.suppress(KeyError):
                        selector.unregister(stub)
                    with contextlib.suppress(OSError):
                        stub.send(status.to_bytes(4, sys.byteorder))
                    stub.close()


def _watch_launcher_of(stub: int) -> None:
    """Leave a process that ends a stub's launcher if this hangs without stubs, in the place of the job's witness."""
    patience = patience_s()
    if not patience:
        return
    with contextlib.suppress(OSError):
        launcher = int(Path(f"/proc/{stub}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{launcher}/comm").read_text().strip() not in LAUNCHERS:
            return  # it has ended
        end = os.pidfd_open(launcher)
        try:
            subprocess.Popen(
                command(patience, OF_ENDED_RANKS, [(launcher, end)]), pass_fds=[end],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(end)


def _become_rank(request: dict[str, Any], outputs: list[int]) -> dict[str, Any]:
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # of the server's environment
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts"):  # of the emulated host
        theirs, own = Path(f"/proc/{request['pid']}/ns/{kind}"), Path(f"/proc/self/ns/{kind}")
        if theirs.readlink() != own.readlink():
            with theirs.open() as file:
                if libc.setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns of {theirs}")
    return request


def _load() -> None:
    """Load the compiler's tables, which take most of a rank's start, by running a compiled kernel."""
    import numpy as np

    from mpicomp import kernels

    kernels.of("cpu").sign.all_finite(np.ones(64, np.float32))


def main() -> None:
    """Run the server, or one rank."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    def finalize() -> None:
        """End MPI unless a rank has died: MPI_Finalize may wait for it for ever."""
        if MPI.Is_initialized() and not MPI.Is_finalized() and not MPI.COMM_WORLD.Get_failed().size:
            MPI.Finalize()

    atexit.register(finalize)  # runs last, like mpi4py's own handler, which only an import that starts MPI registers
    path, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    _load()
    request = serve(path)
    if request is not None:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        sys.argv[:] = request["arguments"]
        sys.path[0] = str(Path(sys.argv[0]).parent)  # as Python does: programs import their neighbours
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
