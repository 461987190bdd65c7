"""Loops over arrays, for each kind of device: arrays and scalars in, `out` last.

Kernels release the interpreter's lock, allocate nothing and validate nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import SimpleNamespace

_MODULES = (
    "bucketed", "clipping", "ef_sign", "elias_counts", "error_feedback", "philox", "planes", "quantizer", "rans",
    "rows", "shared_selection", "sign", "sixteen_bits", "sparse", "ssdm", "top_k", "vote_counts",
)  # fmt: skip


@cache
def of(device: str) -> SimpleNamespace:
    """The kernels of a device, a module for each family: ``of("cpu").sign.pack``.

    Raises
    ------
    ValueError
        There are no kernels for such a device.
    """
    if device != "cpu":
        raise ValueError(f"there are no kernels for device {device!r}: pass a tensor in CPU memory")
    return SimpleNamespace(**{name: import_module(f"mpicomp.kernels.{device}.{name}") for name in _MODULES})
