"""The GPUs of a job's ranks: each has one, or shares it with others of its node."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

from collectives import Communicator
from collectives.arrays import Device, named
from collectives.consistency.call_check import gather_texts
from mpicomp import kernels
from mpicomp.algorithms import Algorithm
from mpicomp.cli.rank0 import require_none

DEVICES = ("cpu", "cuda")
HOST_ONLY: Mapping[str, object] = {"device": "cpu", "encoded_on": "cpu"}


@dataclass(frozen=True)
class Gpu:
    """The GPU of this rank.

    Attributes
    ----------
    device : Device
    where : str
        Its name, as in "cuda:1".
    encodes : bool
        Whether vectors are encoded there.
    told : mapping
        What a report says of the GPUs of all ranks.
    """

    device: Device
    where: str
    encodes: bool
    told: Mapping[str, object]

    @property
    def start(self) -> str:
        """What a method is started with, as `Algorithm.start` takes it."""
        return self.where if self.encodes else "cpu"


def find_gpu(comm: Communicator, algorithm: Algorithm | None, dtype: str) -> Gpu:
    """The GPU of this rank: those of a node are dealt to its ranks in turn; collective.

    Parameters
    ----------
    comm : Communicator
    algorithm : Algorithm or None
        What is to encode; None: nothing.
    dtype : str
        Of the vectors.

    Raises
    ------
    UsageError
        On every rank, if one has none that can be used.
    """
    host, problem, device, where, name = platform.node(), "", None, "", ""
    encodes = algorithm is not None and algorithm.encodes_on_devices(dtype)
    try:
        number = comm.local_rank % count()
        where, name = f"cuda:{number}", name_of(number)
        device = named(where)
        if encodes:
            kernels.of("cuda")
    except (ImportError, ValueError, RuntimeError) as error:  # the last is PyTorch's
        cure = "install it, or take --device cpu" if isinstance(error, ImportError) else "or take --device cpu"
        problem = f"{comm.here}, on {host}: --device cuda: {error}; {cure}"
    require_none(comm.mpi_comm, problem, comm.timeout)
    assert device is not None
    places = gather_texts(comm.mpi_comm, f"{where} of {host}", comm.timeout)
    names = gather_texts(comm.mpi_comm, name, comm.timeout)
    told = {
        "device": "cuda",
        "encoded_on": "cuda" if encodes else "cpu",
        "gpus": len(set(places)),
        "gpu_names": sorted(set(names)),
    }
    return Gpu(device, where, encodes, told)


def count() -> int:
    """How many GPUs PyTorch finds on this node.

    Raises
    ------
    ValueError
        None, or there is no PyTorch.
    """
    try:
        import torch
    except ImportError as error:
        raise ValueError("PyTorch is missing there: install its build for the GPU") from error
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise ValueError("PyTorch finds no GPU there: start ranks where there is one, with PyTorch's build for it")
    return found


def name_of(number: int) -> str:
    """What its maker calls a GPU."""
    import torch

    return str(torch.cuda.get_device_name(number))
