"""Compiled loops over arrays, for each kind of device: arrays and scalars in, `out` last.

Kernels release the interpreter's lock, allocate nothing and validate nothing. The family `arrays` also has functions by
which codecs allocate, view and convert arrays.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType, SimpleNamespace

import numpy as np

from collectives.annotations import Array

_FOLDERS = {"cpu": "cpu", "cuda": "gpu"}  # of the kernels for a kind of device, as PyTorch calls it


class Kernels(SimpleNamespace):
    """Kernels of a kind of device, with an attribute for each family."""

    def __getattr__(self, family: str) -> ModuleType:
        raise AttributeError(f"there are no kernels {family!r} for this kind of device")


@cache
def of(device: str) -> Kernels:
    """Return the kernels of a kind of device, a module for each family: ``of("cpu").sign.pack``.

    A family is a module in the folder of the kind; some are for the host alone. The kernels of GPUs, "cuda" (NVIDIA's
    and AMD's), are loaded by the first call and need Triton and PyTorch.

    Raises
    ------
    ValueError
        There are no kernels for such a device.
    ImportError
        Triton or PyTorch is missing.
    """
    if device not in _FOLDERS:
        raise ValueError(f"there are no kernels for device {device!r}, only for {', '.join(map(repr, _FOLDERS))}")
    try:
        package = import_module(f"mpicomp.kernels.{_FOLDERS[device]}")
        families = [module.name for module in iter_modules(package.__path__)]
        return Kernels(**{name: import_module(f"{package.__name__}.{name}") for name in families})
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "triton"):
            raise
        raise ImportError(f"kernels for device {device!r} need Triton and PyTorch; no module {error.name!r}") from error


def beside(array: Array) -> Kernels:
    """Return the kernels of the device that holds an array, a NumPy array or a tensor on a GPU."""
    return of("cpu" if isinstance(array, np.ndarray) else "cuda")
