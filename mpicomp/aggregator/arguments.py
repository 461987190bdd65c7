"""Validation of the arguments of `start`: clear ones are converted, all others raise an error of one sentence."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.arrays import named
from collectives.arrays.elements import FLOATS
from collectives.errors import marked
from collectives.quoting import shown
from mpicomp import kernels
from mpicomp.aggregator.spec import VectorSpec

if TYPE_CHECKING:
    from mpicomp.aggregator.algorithm import Algorithm


def expression(method: object) -> str:
    """Return a method as a Python expression, without options at their defaults."""
    if not is_dataclass(method):
        return repr(method)
    options = ((field.name, field.default, getattr(method, field.name)) for field in fields(method))
    given = ", ".join(f"{name}={value!r}" for name, default, value in options if value != default)
    return f"{type(method).__name__}({given})"


def vector_spec(
    comm: Communicator,
    n: Any,
    dtype: Any,
    vector_id: int,
    tensor_lengths: Sequence[int] | None,
    device: str,
    method: Algorithm,
    tensor_shapes: Sequence[Sequence[int]] | None = None,
) -> VectorSpec:
    """Return the checked description of the vectors; parameters as in `Algorithm.start`.

    Raises
    ------
    TypeError, ValueError, MemoryError
        An argument cannot be used; the other ranks raise CollectiveMismatch in their next call.
    """
    require_communicator(comm, "start", "start(comm, n)", n)
    with comm.refusing("start", TypeError, ValueError, ImportError, MemoryError):
        if tensor_lengths is not None and tensor_shapes is not None:
            raise ValueError("tensor_lengths and tensor_shapes are both given: pass the shapes alone")
        lengths = None if tensor_lengths is None else tuple(map(_whole, tensor_lengths))
        shapes = None if tensor_shapes is None else _shapes(tensor_shapes)
        if shapes is not None:
            lengths = tuple(map(math.prod, shapes))
        if not isinstance(vector_id, int | np.integer):
            raise TypeError(f"vector_id is {shown(vector_id)}; pass a whole number, another one for each vector")
        spec = VectorSpec(_whole(n), _name(dtype), vector_id, lengths, device, shapes)
        _check_memory(spec)
        if device != "cpu":
            _check_device(spec, method)
        elif method.needs_devices:
            raise ValueError(
                f"{method} takes vectors on GPUs that their methods encode there, and this one is encoded on the CPU: "
                "pass device='cuda', or local='auto'"
            )
        return spec


def _shapes(tensor_shapes: Any) -> tuple[tuple[int, ...], ...]:
    try:
        shapes = tuple(tuple(map(_whole, shape)) for shape in tensor_shapes)
    except TypeError:
        shapes = ((-1,),)
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(
            f"tensor_shapes must be shapes of tensors that are not empty, such as [(32, 16), (16,)], not "
            f"{tensor_shapes!r:.80}"
        )
    return shapes


def require_communicator(comm: Any, call: str, usage: str, *others: Any) -> None:
    """Raise TypeError unless `comm` is a communicator; the message points out one among the other arguments."""
    if isinstance(comm, Communicator):
        return
    swapped = next((one for one in others if isinstance(one, Communicator)), None)
    if swapped is not None or hasattr(comm, "message_model"):  # of a method
        cure = f"the arguments are in another order: write {usage}"
    elif isinstance(comm, MPI.Comm):
        cure = "wrap it: Communicator(mpi_comm)"
    elif isinstance(comm, int) and "root" in usage:
        cure = f"the root comes behind the communicator: write {usage}"
    else:
        cure = "pass a Communicator"
    error = f"{call}: comm is {type(comm).__name__} {re.sub(' at 0x[0-9a-f]+', '', repr(comm)):.80}: {cure}"
    if swapped is not None:
        swapped.reject(TypeError(f"{swapped.here}, {error}"), call)
    raise marked(TypeError(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, {error}")) from None


def _check_device(spec: VectorSpec, method: Algorithm) -> None:
    """Raise unless the method can encode such vectors on the device."""
    cure = "leave out device: vectors on GPUs are then encoded on the CPU"
    if not method.encodes_on_devices(spec.dtype):
        raise ValueError(f"{method} encodes vectors of {spec.dtype} on the CPU alone, not on {spec.device}; {cure}")
    named(spec.device)
    kernels.of("cuda")


def _check_memory(spec: VectorSpec) -> None:
    """Raise MemoryError if a single vector exceeds the memory, before anything is allocated for it."""
    nbytes = spec.n * spec.stored.itemsize
    if nbytes > _machine_bytes():
        problem = f"a vector of {spec.n} elements of {spec.dtype} takes {_gib(nbytes)}, and {memory_in_words()}"
        raise MemoryError(f"{problem}: pass the number of elements of your vector, or cut it into several")


def memory_in_words() -> str:
    """Return the memory of this machine in words, and the available part where the system reports it."""
    text = f"this machine has {_gib(_machine_bytes())}"
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        text += f", of which {_gib(1024 * int(free))} are available"
    return text


@cache
def _machine_bytes() -> int:
    """Return the bytes of memory of this machine, or the limit of this job."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"


def _whole(n: Any) -> int:
    shape = getattr(n, "shape", ())
    if shape or isinstance(n, list | tuple):
        what = f"of shape {list(shape)}" if shape else f"{n!r:.80}"
        raise TypeError(
            f"{type(n).__name__} {what} is no number of elements: pass a whole one, such as vector.size or "
            "len(vector), and the vector itself to aggregate"
        )
    if isinstance(n, float | np.floating) and float(n).is_integer():
        return int(n)
    try:
        return index(n)
    except TypeError:
        raise TypeError(f"{n!r:.80} is no number of elements: pass a whole one, such as vector.size") from None


def _name(dtype: Any) -> str:
    """Return NumPy's name of a type, which may be a type of NumPy or torch or text."""
    text = str(dtype)
    name = text.removeprefix("torch.")
    if name in FLOATS:
        return name
    try:
        # NumPy would take None for float64
        return np.dtype(name if isinstance(dtype, str) or dtype is None or name != text else dtype).name
    except TypeError:
        raise TypeError(f"there is no type {dtype!r}: choose one of {', '.join(FLOATS)}") from None
