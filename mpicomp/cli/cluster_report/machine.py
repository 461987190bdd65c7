"""Description of the machines of a job for a report, without names of hosts, users or paths."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mpi4py import MPI

import mpicomp
from collectives import Communicator
from mpicomp.cli.cluster_report.validation import PRODUCT, VERSION
from mpicomp.cli.doctor.environment import memory_limit, quota
from mpicomp.cli.doctor.gpu import gpu_names
from mpicomp.cli.kernel_files import cpu_name, kilobytes

PACKAGES = ("mpi4py", "numpy", "numba", "torch")
GB = 1e9


def describe_job(comm: Communicator) -> dict[str, Any]:
    """Return machine, MPI library and versions of a job for its report; collective."""
    nodes = [found for found, is_first in comm.allgather_object((describe_node(), comm.local_rank == 0)) if is_first]
    library, numbers = MPI.get_vendor()
    return {
        "machine": {
            # of nodes that differ, the least memory and cores and the highest load
            "cpus": sorted({node["cpu"] for node in nodes}),
            "cores_per_node": min(node["cores"] for node in nodes),
            "memory_gb_per_node": min(node["memory_gb"] for node in nodes),
            "load_per_core": max(node["load"] for node in nodes),
            "gpus_per_node": [
                {"name": name, "count": max(node["gpus"][name] for node in nodes)}
                for name in sorted({name for node in nodes for name in node["gpus"]})
            ],
        },
        "ranks_per_node": list(comm.layout.sizes),
        "mpi": {"library": product(library), "version": ".".join(map(str, numbers))},
        "versions": {"mpicomp": number(mpicomp.__version__), "python": number(platform.python_version())}
        | {name: find_version(name) for name in PACKAGES},
    }


def describe_node() -> dict[str, Any]:
    """Return processor, cores, memory, load and GPUs of this node, as far as this job may use them."""
    cores = min(os.cpu_count() or 1, quota())
    memory = min(kilobytes(Path("/proc/meminfo"), "MemTotal") * 1024, memory_limit())
    return {
        "cpu": product(cpu_name()),
        "cores": round(cores, 1),
        "memory_gb": round(memory / GB, 1),
        "load": round(os.getloadavg()[0] / cores, 2),
        "gpus": Counter(map(product, gpu_names())),
    }


def free_bytes() -> float:
    """Return the memory that this node's ranks may still take."""
    return min(kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024, memory_limit(left=True))


def product(text: str) -> str:
    """Return the name of a product as the schema of reports accepts it, or "unknown"."""
    text = " ".join(text.split())
    return text if re.search(PRODUCT, text) else "unknown"


def number(text: str) -> str:
    """Return the version number that a text begins with; a local build may have a name of a person behind it."""
    found = re.match(VERSION.removesuffix("$"), text)
    return found[0] if found else "unknown"


def find_version(package: str) -> str | None:
    """Return the version of a package, or None where it is not installed."""
    try:
        return number(version(package))
    except PackageNotFoundError:
        return None
