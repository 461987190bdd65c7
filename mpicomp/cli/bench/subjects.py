"""The two sides of a comparison: what is timed, and the baseline it is timed against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, Traffic
from mpicomp.algorithms import Aggregator, Algorithm, Dense


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
    """`Communicator.allreduce`, the dense sum as a user calls it."""

    sums = True

    def __init__(self, comm: Communicator, x: NDArray[Any]) -> None:
        """See `Subject`."""
        self._comm = comm

    def __call__(self, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Reduce."""
        self._comm.allreduce(x, "sum", out)

    def total(self) -> Traffic:
        """Cost so far."""
        return replace(self._comm.traffic)


class MpiAllreduce:
    """MPI's own, blocking all-reduce with nothing around it; of float16 vectors as float32, MPI's smallest."""

    sums = True

    def __init__(self, comm: Communicator, x: NDArray[Any]) -> None:
        """See `Subject`."""
        self._mpi_comm, self._trace = comm.mpi_comm, comm.trace
        self._wide = (x.astype(np.float32), np.empty(x.size, np.float32)) if x.dtype == np.float16 else None

    def __call__(self, x: NDArray[Any], out: NDArray[Any]) -> None:
        """Reduce."""
        source, target = (x, out) if self._wide is None else self._wide
        if self._trace is None:
            self._mpi_comm.Allreduce(source, target)
        else:
            with self._trace.span("call", "MPI_Allreduce", bytes=source.nbytes):
                self._mpi_comm.Allreduce(source, target)

    def total(self) -> Traffic:
        """Cost so far."""
        return Traffic()


def baseline(name: str, comm: Communicator, x: NDArray[Any]) -> Subject | None:
    """What ``--baseline`` names; None: nothing."""
    if name == "mpi":
        return MpiAllreduce(comm, x)
    return Aggregated(Dense(), comm, x.size, x.dtype.name) if name == "dense" else None
