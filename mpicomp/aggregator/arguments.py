"""What `start` is given: taken where its meaning is clear, refused in one sentence where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.devices import named
from collectives.errors import marked
from collectives.memory import FLOATS
from mpicomp import kernels
from mpicomp.aggregator.spec import VectorSpec


class Encoding(Protocol):
    """A method, as far as it says where it can encode."""

    def encodes_on_devices(self, dtype: str) -> bool:
        """See `Algorithm`."""
        ...


def vector_spec(
    comm: Communicator,
    n: Any,
    dtype: Any,
    vector_id: int,
    tensor_lengths: Sequence[int] | None,
    device: str,
    method: Encoding,
) -> VectorSpec:
    """The vectors that `Algorithm.start` is to make an aggregator for; parameters as there.

    Raises
    ------
    TypeError, ValueError
        An argument cannot be used; the other ranks raise CollectiveMismatch in their next call.
    """
    require_communicator(comm, "start", "start(comm, n)", n)
    try:
        lengths = None if tensor_lengths is None else tuple(map(_whole, tensor_lengths))
        spec = VectorSpec(_whole(n), _name(dtype), vector_id, lengths, device)
        if device != "cpu":
            _check_device(spec, method)
        return spec
    except (TypeError, ValueError, ImportError) as error:
        comm.reject(type(error)(f"{comm.here}, start: {error}"), "start")


def require_communicator(comm: Any, call: str, usage: str, *others: Any) -> None:
    """Raise TypeError unless `comm` is a communicator; one of the other arguments may be it."""
    if isinstance(comm, Communicator):
        return
    swapped = next((one for one in others if isinstance(one, Communicator)), None)
    if swapped is not None:
        cure = f"the arguments are in another order: write {usage}"
    elif isinstance(comm, MPI.Comm):
        cure = "wrap it: Communicator(mpi_comm)"
    elif isinstance(comm, int) and "root" in usage:
        cure = f"the root comes behind the communicator: write {usage}"
    else:
        cure = "pass a Communicator"
    error = f"{call}: comm is {type(comm).__name__} {comm!r:.80}: {cure}"
    if swapped is not None:
        swapped.reject(TypeError(f"{swapped.here}, {error}"), call)
    raise marked(TypeError(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, {error}")) from None


def _check_device(spec: VectorSpec, method: Encoding) -> None:
    """Raise unless the method can encode such vectors on the device."""
    cure = "leave out device: vectors on GPUs are then encoded on the CPU"
    if not method.encodes_on_devices(spec.dtype):
        raise ValueError(f"{method} encodes vectors of {spec.dtype} on the CPU alone, not on {spec.device}; {cure}")
    named(spec.device)
    kernels.of("cuda")


def _whole(n: Any) -> int:
    if isinstance(n, float | np.floating) and float(n).is_integer():
        return int(n)
    try:
        return index(n)
    except TypeError:
        raise TypeError(f"{n!r:.80} is no number of elements: pass a whole one, such as vector.size") from None


def _name(dtype: Any) -> str:
    """NumPy's name of a type that NumPy, torch or text names."""
    text = str(dtype)
    name = text.removeprefix("torch.")
    if name in FLOATS:
        return name
    try:
        # None would be float64 for NumPy
        return np.dtype(name if isinstance(dtype, str) or dtype is None or name != text else dtype).name
    except TypeError:
        raise TypeError(f"there is no type {dtype!r}: choose one of {', '.join(FLOATS)}") from None
