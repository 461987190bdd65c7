"""One rank of a case: ``python -m apps.chaos.rank CASE.json FOLDER``, under ``mpirun --with-ft ulfm``.

It writes a line of JSON for each fault and each step, at once: a killed rank leaves the lines up to its death.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from apps.chaos.case import Case
from apps.chaos.lines import Lines
from apps.chaos.training import Training
from apps.faults import Fault, Injector
from apps.records import read_record
from collectives import Communicator, DamagedMessage
from collectives.atomic_file import replacing

TIMEOUT_S = 60.0


def run(case: Case, folder: Path) -> None:
    """Make the steps of a case."""
    number = MPI.COMM_WORLD.rank
    lines = Lines(folder / f"rank-{number}.jsonl")

    def write_fault(fault: Fault) -> None:
        lines.write("fault", fault=str(fault), step=fault.step, residual=norm(aggregator.residual))

    def norm(residual: Any) -> float:
        return 0.0 if residual is None or not residual.size else float(np.abs(residual).sum(dtype=np.float64))

    faults = Injector(case.faults, number, write_fault)
    with faults.installed():
        comm = Communicator(
            faults.watch(MPI.COMM_WORLD), case.topology, TIMEOUT_S, arrival_timeout=TIMEOUT_S, on_failure="regroup",
            checksums=case.checksums,
        )  # fmt: skip
        training = Training(case, number)
        aggregator = training.start(comm)
        lines.write("start", pid=os.getpid())
        step = 0
        try:
            for step in range(case.steps):
                faults.begin(step)
                vector, begun = training.vector(step), time.monotonic()
                handles = [comm.iallreduce(np.full(3, 1.0 + number)) for _ in range(case.sums)]
                result = aggregator.aggregate(vector)
                sums = [float(handle.wait()[0]) for handle in handles]
                training.apply(result)
                lines.write(
                    "step", step=step, begun=begun, members=comm.members, digest=training.digest, loss=training.loss,
                    sums=sums, projections=training.project(vector, result, aggregator),
                    residual=norm(aggregator.residual),
                )  # fmt: skip
                if case.saves:
                    with faults.checkpoint():
                        lines.write("save", step=step, error=_save(folder / f"state-{number}", training.digest))
                faults.end()
            in_flight = len(comm.calls.ordered)
            comm.close()
            lines.write("end", in_flight=in_flight)
        except DamagedMessage as error:
            lines.write("damaged", step=step, error=str(error))


def _save(path: Path, digest: int) -> str:
    """Write a state; returns the error of a full disk, or an empty text."""
    try:
        with replacing(path) as file:
            file.write(f"{digest}".encode())
    except OSError as error:
        return str(error)
    return ""


def main() -> None:
    """Run one rank."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the watchdog's request for stacks
    run(Case.of_record(read_record(Path(sys.argv[1]))), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
