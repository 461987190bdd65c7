"""Names that users of Horovod and torch.distributed look for in this package, and the names to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType

from collectives.quoting import suggestion
from mpicomp import torch

_MAKE = "comm = mpicomp.Communicator()"
_BACKEND = "torch.distributed has it, on the backend 'mpicomp'"
_OF_COMMUNICATORS = (
    *("rank", "size", "local_rank", "local_size"),
    *("allgather", "allgather_object", "barrier", "broadcast", "broadcast_object", "grid", "iallreduce", "irecv"),
    *("isend", "recv", "send", "split"),
)
_ALIKE = {
    f"there is nothing to initialize: {_MAKE}": ("init", "init_process_group", "is_initialized"),
    f"it has no counterpart here: {_BACKEND}": ("Product", "alltoall", "reducescatter"),
    "write part = comm.split(color)": ("ProcessSet", "add_process_set"),
    "all goes by MPI: run mpicomp doctor": ("mpi_enabled", "mpi_built", "nccl_built", "gloo_built"),
}

COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"write comm.{name}, where {_MAKE}" for name in _OF_COMMUNICATORS},
        **{name: f"it is in mpicomp.torch: from mpicomp.torch import {name}" for name in torch.__all__},
        **{name: text for text, names in _ALIKE.items() for name in names},
        "shutdown": f"write comm.close(), where {_MAKE}",
        "get_rank": f"write comm.rank, where {_MAKE}",
        "get_world_size": f"write comm.size, where {_MAKE}",
        "cross_rank": "write cross = comm.split(comm.local_rank), then cross.rank",
        "cross_size": "write cross = comm.split(comm.local_rank), then cross.size",
        "allreduce": f"write comm.allreduce(x, op='mean'), where {_MAKE}",
        "all_reduce": f"write comm.allreduce(x, out=x), where {_MAKE}",
        "all_gather": f"write comm.allgather(x), where {_MAKE}",
        "allreduce_": "write comm.allreduce(x, op='mean', out=x)",
        "allreduce_async": "write handle = comm.iallreduce(x, op='mean'), then handle.wait()",
        "allreduce_async_": "write handle = comm.iallreduce(x, op='mean', out=x), then handle.wait()",
        "grouped_allreduce": "write comm.iallreduce(x, op='mean') for each tensor, then wait() on each handle",
        "broadcast_": "comm.broadcast(x, root) works in place",
        "broadcast_global_variables": "write mpicomp.torch.broadcast_parameters(model, comm)",
        "poll": "write handle.poll(), where handle = comm.iallreduce(x)",
        "synchronize": "write handle.wait(), where handle = comm.iallreduce(x), or optimizer.synchronize()",
        "join": "write for batch in optimizer.join(batches), with the optimizer of mpicomp.torch.DistributedOptimizer",
        "Average": "write op='mean'",
        "Sum": "write op='sum'",
        "Min": "write op='min'",
        "Max": "write op='max'",
        "ReduceOp": "write op='sum', 'mean', 'min' or 'max'",
        "Adasum": "it has no counterpart: write op='mean'",
        "Compression": "pass a method, such as mpicomp.Marsit() or mpicomp.Dense(wire='float16')",
        "PowerSGDState": "write state, hook = mpicomp.torch.ddp_hook(mpicomp.PowerSGD(rank=1), comm, model)",
        "powerSGD_hook": "write state, hook = mpicomp.torch.ddp_hook(mpicomp.PowerSGD(rank=1), comm, model)",
        "SyncBatchNorm": "it has no counterpart: write mpicomp.torch.average_buffers(model, comm)",
        "elastic": "write mpicomp.Communicator(on_failure='regroup'), see mpicomp help faults, or save states",
        "run": "start the program with mpirun, or call mpicomp.run_local(n, work) for ranks that are threads",
        "start_timeline": "write mpicomp.Communicator(trace='traces')",
        "stop_timeline": "a trace ends with comm.close()",
    }
)
"""Replacement of each name."""


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that a module lacks, with the replacement if there is one."""
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):
        return AttributeError(text)
    if cure := COUNTERPARTS.get(name):
        return AttributeError(f"{text}: {cure}; mpicomp help migrating lists all counterparts")
    if name[:1].isupper():  # the import of a submodule comes here too, and must import no other
        methods = import_module("mpicomp.algorithms").ALGORITHMS.items()
        for young in (method for method, kind in methods if kind.__name__ == name):
            return AttributeError(f"{text}: write mpicomp.algorithm({young!r})")
    return AttributeError(f"{text}{suggestion(name, [*known, *COUNTERPARTS])}")
