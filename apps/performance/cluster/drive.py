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

from apps.emulator.link_speed import Measured, measure
from apps.emulator.mpirun import mpirun
from apps.emulator.network import ClusterError, Network
from apps.performance.cluster.grid import Cell, Net, default_budget_s
from apps.performance.cluster.records import merge, write
from apps.performance.cluster.tuned import SETTINGS
from apps.performance.cluster.ways import MEMORY_PART, MPICH_DEFAULT, choose, memory_bytes, of_library
from apps.performance.facts import memory_scaling
from apps.performance.jobs import PROJECT
from apps.performance.record import Record

LONGEST_JOB_S = 1800.0
GRACE_S = 10.0
MPICH_PYTHON = PROJECT / ".venv-mpich" / "bin" / "python"


@dataclass(frozen=True)
class Limits:
    """Of one cell.

    Attributes
    ----------
    budget_s : float, optional
        For timed calls with Open MPI; the least calls of each way are made even where they take longer. MPICH gets a
        third. Default: `default_budget_s` of the cell.
    longest_s : float
        A way that is expected to take longer a call is left out.
    """

    budget_s: float | None = None
    longest_s: float = 15.0

    def budget_of(self, cell: Cell) -> float:
        """Seconds for a cell."""
        return default_budget_s(cell) if self.budget_s is None else self.budget_s


def job_sequence(mpich: bool) -> list[str]:
    """The libraries of the jobs that take turns on a cluster; without MPICH one job is enough."""
    return ["openmpi", "mpich"] * 2 if mpich else ["openmpi"]


def measure_cells(
    net: Net, cells: Sequence[Cell], folder: Path, limits: Limits, mpich: bool, fresh: bool = False
) -> None:
    """Measure cells of one cluster, in turns of the libraries; unless `fresh`, parts that are there stay as they are.

    Raises
    ------
    ClusterError
        A link is not what was asked for, or a job failed; parts that were measured before stay.
    """
    sequence = job_sequence(mpich)
    parts = {cell: [folder / "parts" / f"{cell.name}.{job}.json" for job in range(len(sequence))] for cell in cells}
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    for path in (path for paths in parts.values() for path in paths if fresh):
        path.unlink(missing_ok=True)
    left_out: dict[Cell, dict[str, str]] = {cell: {} for cell in cells}
    with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as scratch, Network(net.layout) as network:
        links = link_records(measure(network))
        for job, library in enumerate(sequence):
            ways = of_library(library, net.nodes)
            asked = []
            for cell in cells:
                chosen, without = choose(ways, cell, limits.budget_of(cell), limits.longest_s)
                if library == "mpich" and MPICH_DEFAULT in without:
                    chosen = []  # the others are there to be compared with it
                if memory_bytes(chosen, cell) > MEMORY_PART * free_bytes():
                    chosen, without = [], {way.name: "not enough memory" for way in ways}
                left_out[cell] |= {_named(name, library): why for name, why in without.items()}
                path = parts[cell][job]
                if chosen and not path.exists():
                    share = sequence.count(library) * (3 if library == "mpich" else 1)
                    asked.append({"bytes": cell.nbytes, "ways": [way.name for way in chosen],
                                  "budget_s": limits.budget_of(cell) / share, "path": str(path.resolve())})  # fmt: skip
            if asked:
                request = {"cells": asked, "links": links, "advise": library == "openmpi"}
                run_job(network, Path(scratch), net, library, request)
    for cell in cells:
        mine = [path for path in parts[cell] if path.exists()]
        if mine:
            write(merge([json.loads(path.read_text()) for path in mine], left_out[cell]), folder / f"{cell.name}.json")
        for path in mine:
            path.unlink()


def measure_alone(kind: str, net: Net, path: Path, **request: Any) -> Record:
    """One of `apps.performance.cluster.job`'s other kinds of job, on a cluster of its own; returns the record.

    Raises
    ------
    ClusterError
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as scratch, Network(net.layout) as network:
        links = link_records(measure(network))
        run_job(network, Path(scratch), net, kind, {**request, "links": links, "path": str(path.resolve())})
    record: Record = json.loads(path.read_text())
    return record


def run_job(network: Network, folder: Path, net: Net, library: str, request: dict[str, Any]) -> None:
    """Run `apps.performance.cluster.job` on all hosts to its end.

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
    run_on_hosts(
        network, folder, f"{library} job on {net.name}", ["-m", "apps.performance.cluster.job", str(path)], library
    )


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
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-30:])
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


def link_records(links: Sequence[Measured]) -> list[dict[str, Any]]:
    """Measured links for a record."""
    return [{"what": link.what, "asked": str(link.asked), "bits_per_s": link.bits_per_s} for link in links]


def tell(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _named(name: str, library: str) -> str:
    return name if library == "openmpi" else f"{name} (MPICH job)"
