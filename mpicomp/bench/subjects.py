"""The two sides of a comparison: what is timed, and the baseline it is timed against."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, Traffic
from collectives.agreement import NBYTES
from mpicomp.algorithms import Aggregator, Algorithm, Dense

ALIGNMENT = 64


class Subject(Protocol):
    """One way to reduce a vector.

    Attributes
    ----------
    sums : bool
        The result is the sum over ranks; else it is, or stands for, the mean.
    """

    sums: bool

    def __call__(self, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Reduce `x` into `out`; this call alone is timed."""
        ...

    def total(self) -> Traffic:
        """What all calls so far have cost this rank; a copy."""
        ...


class Aggregated:
    """A method of `mpicomp.ALGORITHMS`."""

    sums = False

    def __init__(self, algorithm: Algorithm, comm: Communicator, n: int, dtype: str) -> None:
        self.aggregator: Aggregator = algorithm.start(comm, n, dtype=dtype)

    def __call__(self, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Reduce."""
        self.aggregator.aggregate(x, out)

    def total(self) -> Traffic:
        """Cost so far."""
        return replace(self.aggregator.traffic.total)


class Allreduce:
    """`Communicator.allreduce`, the dense sum as a user calls it. It keeps no account: one more call counts for all."""

    sums = True

    def __init__(self, comm: Communicator, x: NDArray[Any]) -> None:
        """See `Subject`."""
        self._comm, self._calls = comm, 0
        self._cost = Traffic(calls=1, bytes_sent=NBYTES, messages=1) if comm.size > 1 else Traffic(calls=1)
        comm.dense(x, x.dtype.name, False, aligned_empty(x.size, x.dtype), self._cost)

    def __call__(self, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Reduce."""
        self._calls += 1
        self._comm.allreduce(x, "sum", out)

    def total(self) -> Traffic:
        """Cost so far."""
        return Traffic(**{item.name: self._calls * getattr(self._cost, item.name) for item in fields(Traffic)})


class MpiAllreduce:
    """MPI's own, blocking all-reduce with nothing around it; of float16 vectors as float32, MPI's smallest."""

    sums = True

    def __init__(self, comm: Communicator, x: NDArray[Any]) -> None:
        """See `Subject`."""
        self._mpi_comm = comm.mpi_comm
        self._wide = (x.astype(np.float32), np.empty(x.size, np.float32)) if x.dtype == np.float16 else None

    def __call__(self, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Reduce."""
        source, target = (x, out) if self._wide is None else self._wide
        self._mpi_comm.Allreduce(source, target)

    def total(self) -> Traffic:
        """Cost so far."""
        return Traffic()


def baseline(name: str, comm: Communicator, x: NDArray[Any]) -> Subject | None:
    """What ``--baseline`` names; None: nothing."""
    if name == "mpi":
        return MpiAllreduce(comm, x)
    return Aggregated(Dense(), comm, x.size, x.dtype.name) if name == "dense" else None


def aligned_empty(n: int, dtype: Any) -> NDArray[Any]:
    """A vector that starts at a multiple of 64 bytes, as torch's do: kernels may then store past the caches."""
    nbytes = n * np.dtype(dtype).itemsize
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes].view(dtype)
