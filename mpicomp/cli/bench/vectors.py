"""Vectors of ``mpicomp bench``, in the host's memory or on a GPU, and the assignment of GPUs to ranks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from collectives import Communicator
from collectives.annotations import Array, FloatArray, Tensor, override
from collectives.arrays import Device, named, wait
from collectives.arrays.elements import aligned_empty
from collectives.consistency.descriptions import gather_texts
from mpicomp import kernels
from mpicomp.algorithms import Algorithm
from mpicomp.cli.command import require_none

DEVICES = ("cpu", "cuda")
HOST_ONLY: Mapping[str, object] = {"device": "cpu", "encoded_on": "cpu"}
TILE = 1 << 20  # elements drawn, or compared, at a time
Vector = FloatArray
Call = Callable[[Array, Array], object]
"""Reduces the first vector into the second."""


class Vectors:
    """Vector `x` of a rank and memory `out` for a result, on the host, where results are checked."""

    def __init__(self, n: int, dtype: str) -> None:
        self.x, self.out = self._empty(n, dtype), self._empty(n, dtype)
        # arguments of calls: the same arrays, or tensors on a device
        self.given: Array = self.x
        self.target: Array = self.out

    def _empty(self, n: int, dtype: str) -> Vector:
        return aligned_empty(n, dtype, 64)

    def fill(self, seed: int, rank: int) -> None:
        """Fill the vector with normally distributed numbers, different ones on each rank."""
        random = np.random.default_rng((seed, rank))
        for start in range(0, self.x.size, TILE):
            self.x[start : start + TILE] = random.standard_normal(min(TILE, self.x.size - start), np.float32)

    def take(self, call: Call) -> None:
        """Make a call, and copy its result to `out`."""
        call(self.given, self.target)

    def through_host(self, call: Call) -> Call:
        """Turn a call that takes arrays of the host into one that takes `given` and `target`."""
        return call


class DeviceVectors(Vectors):
    """Vectors on a device, with pinned memory of the host."""

    def __init__(self, device: Device, n: int, dtype: str) -> None:
        self._device = device
        super().__init__(n, dtype)
        self.given, self.target = tensor(device, n, dtype), tensor(device, n, dtype)

    @override
    def _empty(self, n: int, dtype: str) -> Vector:
        return self._device.pinned(n * np.dtype(dtype).itemsize).view(dtype)

    def _copy(self, source: Array, target: Array) -> None:
        """Copy a vector to the device or from it, and wait for the end."""
        ends = [one if isinstance(one, np.ndarray) else self._device.take(one).vector for one in (source, target)]
        wait(self._device.copy(*ends))

    @override
    def fill(self, seed: int, rank: int) -> None:
        super().fill(seed, rank)
        self._copy(self.x, self.given)

    @override
    def take(self, call: Call) -> None:
        super().take(call)
        self._copy(self.target, self.out)

    @override
    def through_host(self, call: Call) -> Call:
        def staged(given: Array, target: Array) -> None:
            self._copy(given, self.x)
            call(self.x, self.out)
            self._copy(self.out, target)

        return staged


def tensor(device: Device, n: int, dtype: str) -> Tensor:
    """Return a vector of zeros on a device."""
    return device.zeros(n, dtype)


def make_vectors(comm: Communicator, n: int, dtype: str, device: Device | None) -> Vectors:
    """Make a rank's vectors; collective. Raises UsageError on every rank if one has too little memory."""
    vectors, problem = None, ""
    try:
        vectors = Vectors(n, dtype) if device is None else DeviceVectors(device, n, dtype)
    except (MemoryError, ValueError, RuntimeError) as error:  # the last is PyTorch's
        problem = f"rank {comm.rank} of {comm.size}: --count {n}: {error}; take fewer elements, or fewer ranks per node"
    require_none(comm.mpi_comm, problem, comm.timeout)
    assert vectors is not None
    return vectors


# GPUs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuVectors:
    """The GPU of this rank."""

    device: Device
    where: str  # name of the device, such as "cuda:1"
    encodes: bool  # vectors are encoded there
    fields: Mapping[str, object]  # of the report, about the GPUs of all ranks

    @property
    def start(self) -> str:
        """Device for `Algorithm.start`."""
        return self.where if self.encodes else "cpu"


def find_gpu(comm: Communicator, algorithm: Algorithm | None, dtype: str) -> GpuVectors:
    """Assign the GPUs of a node to its ranks in turn; UsageError on every rank if one has no usable GPU. Collective."""
    host, problem, device, where, name = platform.node(), "", None, "", ""
    encodes = algorithm is not None and algorithm.encodes_on_devices(dtype)
    try:
        number = comm.local_rank % gpu_count()
        where, name = f"cuda:{number}", gpu_name(number)
        device = named(where)
        # the method may encode vectors there
        if encodes:
            kernels.of("cuda")
    except (ImportError, ValueError, RuntimeError) as error:  # the last is PyTorch's
        cure = "install it, or take --device cpu" if isinstance(error, ImportError) else "or take --device cpu"
        problem = f"{comm.here}, on {host}: --device cuda: {error}; {cure}"
    require_none(comm.mpi_comm, problem, comm.timeout)
    assert device is not None
    places = gather_texts(comm.mpi_comm, f"{where} of {host}", comm.timeout)
    names = gather_texts(comm.mpi_comm, name, comm.timeout)
    fields = {
        "device": "cuda",
        "encoded_on": "cuda" if encodes else "cpu",
        "gpus": len(set(places)),
        "gpu_names": sorted(set(names)),
    }
    return GpuVectors(device, where, encodes, fields)


def gpu_count() -> int:
    """Return the number of GPUs that PyTorch finds on this node; ValueError if it is missing or finds none."""
    try:
        import torch
    except ImportError as error:
        raise ValueError("PyTorch is missing there: install its build for the GPU") from error
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise ValueError("PyTorch finds no GPU there: start ranks where there is one, with PyTorch's build for it")
    return found


def gpu_name(number: int) -> str:
    """Return the product name of a GPU."""
    import torch

    return str(torch.cuda.get_device_name(number))
