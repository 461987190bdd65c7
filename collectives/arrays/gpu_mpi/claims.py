"""Claims of the MPI library and its environment to take memory of GPUs. Neither CUDA nor a driver is touched.

- Open MPI: ``MPIX_Query_cuda_support()`` and, from 5.0 on, ``MPIX_Query_rocm_support()``, of ``mpi-ext.h``. In 4.x the
  first reports how the library was built, not whether there is a driver
  (docs.open-mpi.org, "CUDA", "Can I tell at compile time or runtime whether I have CUDA-aware support?").
- MPICH: ``MPIX_GPU_query_support(kind, &yes)`` from 3.4 on, kinds as in its ``mpi.h``; ``MPIR_CVAR_ENABLE_GPU=0`` turns
  it off. From 4.1 on it has ``MPIX_Query_cuda_support`` and ``MPIX_Query_hip_support`` too.
- Cray MPICH: ``MPICH_GPU_SUPPORT_ENABLED=1`` turns it on (its manual page, intro_mpi).
- MVAPICH2: ``MV2_USE_CUDA=1``, ``MV2_USE_ROCM=1``; MVAPICH 3 and later: ``MVP_USE_CUDA=1`` (its user guides).
- Intel MPI: ``I_MPI_OFFLOAD=1``; 0 is the default (its developer reference, "GPU Support").
- MPI 4.1: the key ``mpi_memory_alloc_kinds`` of a communicator's info, with ``cuda`` or ``rocm`` among the kinds (the
  standard's side document on memory allocation kinds).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

KINDS = {"cuda": 0, "hip": 2}  # MPIX_GPU_SUPPORT_CUDA and _HIP
QUERIES = ("MPIX_Query_cuda_support", "MPIX_Query_rocm_support", "MPIX_Query_hip_support")
SWITCHES = {  # by a word of the library's version
    "CRAY MPICH": ("MPICH_GPU_SUPPORT_ENABLED",),
    "MVAPICH": ("MV2_USE_CUDA", "MV2_USE_ROCM", "MVP_USE_CUDA", "MVP_USE_ROCM"),
    "Intel(R) MPI": ("I_MPI_OFFLOAD",),
}
OFF = ("MPIR_CVAR_ENABLE_GPU",)  # at 0 they turn off support that the library has


class Claim(NamedTuple):
    """A claim that MPI takes memory of GPUs, or does not."""

    source: str  # its origin, as "MPIX_Query_cuda_support()"
    aware: bool


def claims(environ: Mapping[str, str] = os.environ) -> list[Claim]:
    """Return all claims of the loaded library and its environment."""
    version = MPI.Get_library_version()
    found = [*_queried(_loaded())]
    for word, names in SWITCHES.items():
        if word.lower() in version.lower():
            found += [
                Claim(f"{name}={environ[name]}", environ[name] not in ("", "0")) for name in names if name in environ
            ]
    if kinds := _memory_kinds():
        found.append(Claim(f"mpi_memory_alloc_kinds={kinds}", "cuda" in kinds or "rocm" in kinds))
    off = [name for name in OFF if environ.get(name) == "0"]
    return [Claim(f"{name}=0", aware=False) for name in off] if off else found


def are_positive(found: Iterable[Claim]) -> bool:
    """Return True if a claim is positive, so that a probe is worth its time."""
    return any(claim.aware for claim in found)


def libraries() -> list[str]:
    """Return the files of this process whose names begin with libmpi, the library first; empty without /proc."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in maps if "/libmpi" in line}
    return sorted(files, key=lambda file: (len(Path(file).name), file))


def _loaded() -> Iterable[ctypes.CDLL]:
    for file in libraries():
        with suppress(OSError):  # it was replaced while this process runs
            yield ctypes.CDLL(file)


def _memory_kinds() -> str:
    try:
        info = MPI.COMM_WORLD.Get_info()
    except (MPI.Exception, NotImplementedError):
        return ""
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return kinds


def _queried(loaded: Iterable[object]) -> Iterable[Claim]:
    """Return the claims of functions of the libraries; each function once, though several libraries may have it."""
    answers: dict[str, bool] = {}
    for library in loaded:
        for name in QUERIES:
            if (query := getattr(library, name, None)) is not None:
                answers.setdefault(f"{name}()", query() == 1)
        if (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:
            for kind, number in KINDS.items():
                answers.setdefault(f"MPIX_GPU_query_support({kind})", _supports(partial(query, number)))
    return [Claim(source, aware) for source, aware in answers.items()]


def _supports(query: Callable[[object], int]) -> bool:
    yes = ctypes.c_int(0)
    return query(ctypes.byref(yes)) == 0 and yes.value == 1
