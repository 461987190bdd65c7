"""Jobs on a standing cluster, and the records they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apps.cluster.measured import Measured, measure
from apps.cluster.mpi import mpirun
from apps.cluster.network import ClusterError, Network
from benchmarks.cluster.grid import Cell, Net
from benchmarks.cluster.records import merge, write
from benchmarks.cluster.tuned import SETTINGS
from benchmarks.cluster.ways import LEAST_REPEATS, MEMORY_PART, MPICH_DEFAULT, choose, memory_bytes, of_library
from benchmarks.facts import memory_scaling
from benchmarks.jobs import PROJECT
from benchmarks.record import Record

LONGEST_JOB_S = 1800.0
GRACE_S = 10.0
MPICH_PYTHON = PROJECT / ".venv-mpich" / "bin" / "python"


@dataclass(frozen=True)
class Limits:
    """Of one cell.

    Attributes
    ----------
    budget_s : float
        For timed calls with Open MPI; three calls of each way are made even where they take longer. MPICH gets a third.
    longest_s : float
        A way that is expected to take longer a call is left out.
    """

    budget_s: float = 30.0
    longest_s: float = 15.0


@dataclass(frozen=True)
class Phase:
    """A job of the sequence that takes turns on a cluster: which library, and calls of each way at least."""

    number: int
    library: str
    least: int


def phases(mpich: bool) -> list[Phase]:
    """Open MPI, MPICH, Open MPI, MPICH; without MPICH one job is enough."""
    if not mpich:
        return [Phase(0, "openmpi", LEAST_REPEATS)]
    order = ("openmpi", "mpich") * 2
    return [
        Phase(i, library, (LEAST_REPEATS + 1) // 2 if i < 2 else LEAST_REPEATS // 2) for i, library in enumerate(order)
    ]


def measure_cells(
    net: Net, cells: Sequence[Cell], folder: Path, limits: Limits, mpich: bool, fresh: bool = False
) -> None:
    """Measure cells of one cluster, in turns of the libraries; unless `fresh`, parts that are there stay as they are.

    Raises
    ------
    ClusterError
        A link is not what was asked for, or a job failed; parts that were measured before stay.
    """
    sequence = phases(mpich)
    parts = {
        (cell, phase): folder / "parts" / f"{cell.name}.{phase.number}.json" for cell in cells for phase in sequence
    }
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    for path in parts.values() if fresh else ():
        path.unlink(missing_ok=True)
    left_out: dict[Cell, dict[str, str]] = {cell: {} for cell in cells}
    with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as scratch, Network(net.layout) as network:
        links = [_link(link) for link in measure(network)]
        for phase in sequence:
            ways = of_library(phase.library, net.nodes)
            asked = []
            for cell in cells:
                chosen, without = choose(ways, cell, limits.budget_s, limits.longest_s)
                if phase.library == "mpich" and MPICH_DEFAULT in without:
                    chosen = []  # the others are there to be compared with it
                if memory_bytes(chosen, cell) > MEMORY_PART * free_bytes():
                    chosen, without = [], {way.name: "not enough memory" for way in ways}
                left_out[cell] |= {_named(name, phase.library): why for name, why in without.items()}
                path = parts[cell, phase]
                if chosen and not path.exists():
                    names = [way.name for way in chosen]
                    asked.append({"bytes": cell.nbytes, "ways": names, "path": str(path.resolve())})
            jobs = sum(other.library == phase.library for other in sequence)
            budget_s = limits.budget_s / jobs / (3 if phase.library == "mpich" else 1)
            request = {"cells": asked, "least": phase.least, "budget_s": budget_s, "links": links,
                       "advise": phase.library == "openmpi"}  # fmt: skip
            if asked:
                run_job(network, Path(scratch), net, phase.library, request)
    for cell in cells:
        mine = [parts[cell, phase] for phase in sequence if parts[cell, phase].exists()]
        if mine:
            write(merge([json.loads(path.read_text()) for path in mine], left_out[cell]), folder / f"{cell.name}.json")
        for path in mine:
            path.unlink()


def measure_alone(kind: str, net: Net, path: Path, **request: Any) -> Record:
    """One of `benchmarks.cluster.job`'s other kinds of job, on a cluster of its own; returns the record.

    Raises
    ------
    ClusterError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as scratch, Network(net.layout) as network:
        links = [_link(link) for link in measure(network)]
        run_job(network, Path(scratch), net, kind, {**request, "links": links, "path": str(path.resolve())})
    record: Record = json.loads(path.read_text())
    return record


def run_job(network: Network, folder: Path, net: Net, library: str, request: dict[str, Any]) -> None:
    """Run `benchmarks.cluster.job` on all hosts to its end.

    Its records show the load before it began, not its own, and how memory was shared then.

    Raises
    ------
    ClusterError
        It failed, or took too long; with the end of what it printed.
    """
    path = folder / "request.json"
    head = {
        "net": asdict(net),
        "library": library,
        "address": network.nodes[0].address,
        "facts": {"load": round(os.getloadavg()[0], 2), "memory_scaling": [memory_scaling()]},
    }
    path.write_text(json.dumps(head | request))
    run_on_hosts(network, folder, f"{library} job on {net.name}", ["-m", "benchmarks.cluster.job", str(path)], library)


def run_on_hosts(network: Network, folder: Path, what: str, arguments: Sequence[str], library: str = "openmpi") -> None:
    """Run this Python, or with library "mpich" the one beside that library, on all hosts to its end.

    Raises
    ------
    ClusterError
        It failed, or took too long; with the end of what it printed.
    """
    mpich = library == "mpich"
    python = MPICH_PYTHON if mpich else Path(sys.executable)
    command, found = mpirun(network, folder, "mpich" if mpich else "openmpi", 1, [str(python), *arguments])
    env = dict(found) | {"PYTHONPATH": str(PROJECT)} | ({} if mpich else SETTINGS)
    if mpich:  # the launcher beside its own Python, not beside this one
        command[0] = str(python.with_name("mpirun"))
        env["PATH"] = os.pathsep.join((str(python.parent), env["PATH"]))
    log = folder / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            network.nodes[0].command(command),
            cwd=PROJECT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            status: int | str = job.wait(LONGEST_JOB_S)
        except subprocess.TimeoutExpired:
            status = f"none after {LONGEST_JOB_S:.0f} s"
        finally:
            _end(job)
    if status:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise ClusterError(f"the {what} ended with status {status}; it said last:\n{tail}")


def _end(job: subprocess.Popen[bytes]) -> None:
    """Let it end its ranks; what stays, the network ends with its namespaces."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def has_mpich() -> bool:
    """Whether `make test-mpich` has made its environment."""
    return MPICH_PYTHON.exists() and MPICH_PYTHON.with_name("mpirun").exists()


def free_bytes() -> int:
    """Memory that this machine could give out now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


def tell(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _named(name: str, library: str) -> str:
    return name if library == "openmpi" else f"{name} (MPICH job)"


def _link(link: Measured) -> dict[str, Any]:
    return {"what": link.what, "asked": str(link.asked), "bits_per_s": link.bits_per_s}
