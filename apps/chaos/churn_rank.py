"""One rank of a long training whose ranks die: ``python -m apps.chaos.churn_rank REQUEST.json FOLDER``.

It goes on from the states in the folder, which may be of another number of ranks, and ends at a step that all ranks agree on
once the file ``stop`` is there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

import mpicomp
from apps.chaos.case import Case
from apps.chaos.rank import Lines
from apps.chaos.training import Training
from apps.records import read_record
from collectives import Communicator
from mpicomp.algorithms import Aggregator

TIMEOUT_S = 60.0
KEPT = 2  # checkpoints


def states_of(folder: Path) -> tuple[int, list[Path]]:
    """Return the step of the newest complete checkpoint, and its files in rank order; 0 and none at the beginning."""
    checkpoints: dict[tuple[int, int], list[Path]] = {}
    for path in folder.glob("state-*-*-*.npz"):
        _, step, ranks, _ = path.stem.split("-")
        checkpoints.setdefault((int(step), int(ranks)), []).append(path)
    complete = [key for key, paths in checkpoints.items() if len(paths) == key[1]]
    if not complete:
        return 0, []
    key = max(complete)
    return key[0], sorted(checkpoints[key], key=lambda path: int(path.stem.split("-")[3]))


def save(folder: Path, comm: Communicator, training: Training, aggregator: Aggregator) -> None:
    """Write this rank's state, and remove its old ones."""
    step = aggregator.step
    path = folder / f"state-{step}-{comm.size}-{comm.rank}.npz"
    mpicomp.save_state(path, {**aggregator.state_dict(), "model": training.model})
    own = sorted(folder.glob(f"state-*-{comm.size}-{comm.rank}.npz"), key=lambda one: int(one.stem.split("-")[1]))
    for old in own[:-KEPT]:
        old.unlink()


def restore(folder: Path, comm: Communicator, training: Training, aggregator: Aggregator) -> None:
    """Go on from the newest checkpoint."""
    _, paths = states_of(folder)
    if not paths:
        return
    states = [mpicomp.load_state(path) for path in paths]
    models = [state.pop("model") for state in states]
    training.model = models[0]
    kinds = aggregator.state_kinds
    own = states if len(states) == comm.size else mpicomp.redistribute(states, comm.size, kinds)
    aggregator.load_state_dict(own[comm.rank])


def run(request: dict[str, Any], folder: Path) -> None:
    """Train until the file ``stop`` is there."""
    case, number = Case.of_record(request["case"]), MPI.COMM_WORLD.rank
    lines = Lines(folder / f"rank-{number}.jsonl")
    comm = Communicator(
        topology=case.topology, timeout=TIMEOUT_S, arrival_timeout=TIMEOUT_S, on_failure=request["on_failure"]
    )
    training = Training(case, number)
    aggregator = training.start(comm)
    restore(folder, comm, training, aggregator)
    lines.write("start", pid=os.getpid(), step=aggregator.step)
    stop = folder / "stop"
    while True:
        time.sleep(request["compute_seconds"])  # as a GPU would compute: steps of few ranks take no shorter
        members = comm.members
        training.apply(aggregator.aggregate(training.vector(aggregator.step)))
        step = aggregator.step
        if step % request["look_every"] == 0 or comm.members != members:
            lines.write("step", step=step, members=comm.members, digest=training.digest, loss=training.loss)
        if step % request["look_every"] == 0 and comm.allreduce(float(stop.exists()), "max"):
            break
        if request["checkpoint_every"] and step % request["checkpoint_every"] == 0:
            save(folder, comm, training, aggregator)
    save(folder, comm, training, aggregator)
    lines.write("end", step=aggregator.step, in_flight=comm.calls_in_flight)
    comm.close()


def main() -> None:
    """Run one rank."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    run(read_record(Path(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
