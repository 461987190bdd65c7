"""Rehearsal of a method: a few steps on threads, which compile its kernels ahead of the first call.

Options, dtype, topology and length decide which kernels a step calls, and with which types; there is no list of them. A
rehearsal makes the same steps, and leaves a file next to the compiled kernels, so it runs once per machine. To load
compiled kernels takes a second: a rank that waits rehearses as well, or the others would wait for its first step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.annotations import Array, FloatArray, override
from collectives.arrays import Place, Taken, named, wait
from collectives.arrays.vectors import Flat
from collectives.recovery.newcomers import is_waiting, n_ranks_of_steps
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TopologyName
from mpicomp.aggregator.base import Aggregator, Method
from mpicomp.aggregator.difference import Difference
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.aggregator.vector_views import VectorViews
from mpicomp.kernels.cache_folder import CACHE

MOST_RANKS = 3  # 4 for an even number of ranks, among which votes may tie
MOST_ELEMENTS = 1 << 18  # long enough that every method merges on the way if the size chooses the topology
DEVICE_ELEMENTS = 1 << 16  # of a vector on a GPU: every launch has whole programs and a last one
MOST_DEVICE_RANKS = 8
STEPS = 3
PATIENCE_S = 1e6  # timeout of a rank that waits while another one compiles
WARM = "warm-"
"""Name of the file that marks the kernels of all methods as compiled; the dtype follows."""
_SHORTER: dict[str, Callable[[Any], Any]] = {
    "seed": lambda seed: 0,
    "full_precision_every": lambda steps: min(steps, 2),
    "start_step": lambda steps: min(steps, 1),
    "warmup_steps": lambda steps: min(steps, 1),
}

_lock = threading.Lock()
_done: set[Hashable] = set()
_log = logging.getLogger("mpicomp")


def compile_kernels(method: Any, comm: Communicator, spec: VectorSpec) -> None:
    """Compile the kernels that steps of such vectors call, unless this machine has them; not collective.

    On a rank that waits for others to die they are also loaded.
    """
    loads, size = is_waiting(comm), n_ranks_of_steps(comm)

    def rehearse_all() -> None:
        is_ours = type(method).__module__.startswith("mpicomp.")
        if is_ours and spec.n and (loads or not CACHE.has(WARM + spec.dtype)):
            ranks = min(size, MOST_RANKS + 1 - size % 2)
            # topology "auto" compares a payload's length times the number of sending ranks with a threshold
            n = min(MOST_ELEMENTS, spec.n * max(1, size - 1) // max(1, ranks - 1))
            short = VectorSpec(1 << (n.bit_length() - 1), spec.dtype)
            # only the optimizers of mpicomp.torch pass differences, which have kernels of their own
            with_moves = "mpicomp.torch.buckets.bucket_reducer" in sys.modules
            for one in method.rehearsed:
                rehearse(one, short, ranks, comm.topology, with_moves, loads)

    _call_once((method, comm.topology, size, spec.dtype, spec.n.bit_length()), rehearse_all)


def compile_on_device(method: Any, comm: Communicator, spec: VectorSpec) -> None:
    """Compile and load the kernels that steps of such vectors launch on a GPU, once in a process; not collective.

    Short vectors make the steps. Triton compiles forms of their own for lengths that are multiples of 16, and for
    blocks that end at multiples of 64; so the vectors are short by a multiple of 4096.
    """
    n, lengths = spec.n, spec.tensor_lengths
    if n > DEVICE_ELEMENTS:
        n = DEVICE_ELEMENTS + n % 4096
    if lengths is not None:
        first = 65 if any(length % 64 for length in lengths[:-1]) else 64
        lengths = (first, n - -(-first // 64) * 64) if n > 256 else None
    ranks = min(n_ranks_of_steps(comm), MOST_DEVICE_RANKS)

    def make_steps() -> None:
        short = VectorSpec(n, spec.dtype, 0, lengths, spec.device)
        try:
            _make_steps(_shortened(method.rehearsed[0]), short, ranks, comm.topology, False)
        except Exception as error:  # noqa: BLE001 - kernels are then compiled when they are launched
            _log.debug("no rehearsal of %r on %s: %s", method, spec.device, error)

    if n and _compiles_on_devices():
        _call_once((method, comm.topology, ranks, spec.dtype, spec.device, n, lengths), make_steps)


def _call_once(key: Hashable, work: Callable[[], None]) -> None:
    """Call `work` unless that was done with this key."""
    try:
        if key in _done:
            return
    except TypeError:  # an option or a topology of the user's own is not hashable
        return
    with _lock:
        if key not in _done:
            work()
            _done.add(key)


def _compiles_on_devices() -> bool:
    return os.environ.get("TRITON_INTERPRET") != "1"  # the interpreter has nothing to compile


def rehearse(
    method: Any, spec: VectorSpec, ranks: int, topology: TopologyName | Topology, with_moves: bool, loads: bool = False
) -> None:
    """Make a few steps of a method on ranks that are threads, unless this machine has seen them.

    with_moves : also make steps of a `Difference` if the method is meant for updates.
    loads : make the steps in any case, so that this process has loaded the kernels.
    """
    method = _shortened(method)
    with_moves = with_moves and method.synchronize == "updates" and not spec.is_narrow
    text = f"{method!r} {spec.dtype}[{spec.n}]{' of moves' * with_moves} on {ranks} ranks over {topology!r}"
    mark = f"rehearsed-{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    if CACHE.has(mark) and not loads:
        return
    try:
        _make_steps(method, spec, ranks, topology, with_moves)
    except Exception as error:  # noqa: BLE001 - kernels are then compiled when they are called
        _log.debug("no rehearsal of %s: %s", text, error)
    CACHE.write(mark, text.encode())


def _shortened(method: Any) -> Any:
    """Return the method with options by which a few steps call all of its kernels."""
    options = {field.name: getattr(method, field.name) for field in fields(method) if field.name in _SHORTER}
    return replace(method, **{name: _SHORTER[name](value) for name, value in options.items() if value is not None})


def _make_steps(
    method: Method, spec: VectorSpec, ranks: int, topology: TopologyName | Topology, with_moves: bool
) -> None:
    from collectives.threads.run_local import run_local

    waiting = logging.getLogger("collectives")
    waiting.addFilter(_is_no_rehearsal)
    try:
        options = {"timeout": PATIENCE_S, "arrival_timeout": PATIENCE_S}
        run_local(ranks, lambda comm: _steps_of_rank(method, comm, spec, with_moves), topology, **options)
    finally:
        waiting.removeFilter(_is_no_rehearsal)


_thread = threading.local()


def _is_no_rehearsal(record: logging.LogRecord) -> bool:
    """Drop log records of a rehearsal's ranks, which wait while another one compiles."""
    return not hasattr(_thread, "rehearses")


class _AnyViews(VectorViews):
    """NumPy arrays of every type, and tensors of the device."""

    @override
    def view(self, array: Array) -> Flat:
        dtype = self._spec.dtype
        if self._device is None:
            return Flat(array, dtype, array.shape)
        taken = Taken(dtype, tuple(array.shape), True, array.data_ptr(), array)
        return Flat(array, dtype, taken.shape, Place(self._device, taken, array.nbytes))


def _steps_of_rank(method: Method, comm: Communicator, spec: VectorSpec, with_moves: bool) -> None:
    _thread.rehearses = True
    aggregator = Aggregator(method, comm, spec)
    aggregator.views = _AnyViews(spec, None if spec.device == "cpu" else named(spec.device))
    vector, out = _vector(spec, comm.rank), np.empty(spec.n, spec.stored)
    if spec.device != "cpu":
        device = named(spec.device)
        there, out = device.zeros(spec.n, spec.dtype), device.zeros(spec.n, spec.dtype)
        wait(device.copy(vector, there))
        vector = there
    for _ in range(STEPS):
        aggregator.aggregate(vector, out)
    if with_moves:
        room = np.zeros_like(vector)
        for _ in range(STEPS):
            moves = Difference([vector.copy()], [out.copy()], [room], room)
            aggregator.aggregate(moves, np.empty_like(out))
            moves.subtract_result()


def _vector(spec: VectorSpec, rank: int) -> FloatArray:
    values = np.random.default_rng(rank).standard_normal(spec.n, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if spec.dtype == "bfloat16" else values.astype(spec.stored)
