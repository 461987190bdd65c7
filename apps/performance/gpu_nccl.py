"""NCCL's all-reduce, or RCCL's, next to those of this package."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from apps.performance.gpu_machine import Place
from collectives import Communicator

Found = tuple[Callable[[], object] | None, str]


@contextmanager
def nccl_allreduce(comm: Communicator, place: Place, x: Any) -> Iterator[Found]:
    """Give a call that averages a copy of `x` in place, and waits for it; or None, and why not. Collective."""
    lack = why_not(place)
    if lack:
        yield None, lack
        return
    import torch
    import torch.distributed as dist

    with process_group(comm, place):
        averaged = x.clone()

        def call() -> None:
            dist.all_reduce(averaged, dist.ReduceOp.AVG)
            torch.cuda.synchronize()

        yield call, ""


@contextmanager
def process_group(comm: Communicator, place: Place) -> Iterator[None]:
    """Make a default process group of all ranks: of NCCL, or of Gloo where NCCL cannot be used; collective."""
    import torch.distributed as dist

    backend = "gloo" if why_not(place) else "nccl"
    dist.init_process_group(backend, store=_store(comm), rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def why_not(place: Place) -> str:
    """Why NCCL cannot be timed; empty if it can."""
    if not place.alone:
        return "ranks share a GPU, and it takes one each"
    import torch.distributed as dist

    return "" if dist.is_available() and dist.is_nccl_available() else "PyTorch is built without it"


def _store(comm: Communicator) -> Any:
    """Return the address on rank 0's host by which the ranks find each other; collective."""
    import torch.distributed

    dist: Any = torch.distributed
    about = {"world_size": comm.size, "timeout": timedelta(seconds=comm.timeout), "wait_for_workers": False}
    host = "127.0.0.1" if comm.one_node else socket.gethostname()
    served = dist.TCPStore(host, 0, is_master=True, **about) if comm.rank == 0 else None
    host, port = comm.broadcast_object(None if served is None else (host, served.port))
    return dist.TCPStore(host, port, is_master=False, **about) if served is None else served
