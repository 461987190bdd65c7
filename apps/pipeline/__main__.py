"""Train a character model in pipeline stages on all ranks of an MPI job.

``mpirun -n 4 python -m apps.pipeline --stages 4 --forward-bits 3 --backward-bits 6 --json run.json --plot run.png``

The exit status is 0 if the run ended, 1 after an error, 2 after a usage error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from apps.pipeline import job
from apps.pipeline.options import Options, parse
from apps.pipeline.plot import draw
from apps.pipeline.program import run_program
from apps.pipeline.report import Report
from apps.pipeline.training import Training
from apps.records import Record, write_record
from apps.train import checkpoint
from apps.train.agreement import JobError, naming_cure, raise_on_all_ranks
from apps.train.options import differing
from collectives import Communicator


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; collective over all ranks of the job. Returns the exit status."""
    return run_program(lambda: parse(argv), train)


def train(found: argparse.Namespace, comm: Communicator) -> None:
    """Train with these options; collective. Unusable options, texts or checkpoints raise JobError on every rank."""
    options: Options = found.options
    with raise_on_all_ranks(comm):
        corpus, weights = job.corpus_of(options), job.weights_of(options)
    if found.checkpoint is not None:
        checkpoint.require_writable(found.checkpoint, comm)
    stores = None if found.checkpoint is None else found.checkpoint / "stores"
    try:
        training = Training(options, comm, corpus, stores, weights)
    except ValueError as error:  # all ranks have the same options and text, and so the same error
        raise JobError(str(error)) from error
    try:
        record = _run(training, comm, found) | {"text": corpus.digest}
        if found.save is not None:
            with raise_on_all_ranks(comm), naming_cure(found.save, "--save file"):
                job.save_weights(training, found.save, comm.rank == 0)
    finally:
        training.close()
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            _write(record, found.json, found.plot)


def _run(training: Training, comm: Communicator, found: argparse.Namespace) -> Record:
    """The epochs that are missing, with a checkpoint after each; returns the record of the run."""
    epochs: list[Record] = []
    start, folder = time.perf_counter(), found.checkpoint
    with Report(comm.rank == 0, training.options, training.steps_per_epoch) as report:
        if found.resume:
            epochs = _resumed(training, comm, folder, report)
        elif folder is not None and checkpoint.checkpoints(folder):
            raise JobError(f"{folder} holds checkpoints of an earlier run; add --resume or name another folder")
        last = min(training.options.epochs, found.stop_after or training.options.epochs)
        while training.epoch < last:
            epochs.append(training.train_epoch(report.advance))
            report.epoch(epochs[-1])
            if folder is not None:
                state = {**training.state_dict(), "epochs": epochs}
                checkpoint.save(folder, comm, training.epoch, training.options.identity(), {}, state)
        record = job.record(training, epochs) | {"seconds": time.perf_counter() - start}
        report.result(record)
    return record


def _resumed(training: Training, comm: Communicator, folder: Path, report: Report) -> list[Record]:
    """Restore the newest checkpoint; returns its epochs, none if there is no checkpoint yet."""
    found = checkpoint.load(folder, comm)
    if found is None:
        return []
    changed = differing(found.options, training.options.identity(), other_ranks=False)
    if changed:
        raise JobError(f"{found.path} belongs to a run with other options: {', '.join(changed)}; use the same")
    training.load_state_dict(found.state)
    report.resumed(str(found.path), training.epoch)
    return list(found.state["epochs"])


def _write(found: Record, json: Path | None, picture: Path | None) -> None:
    if json is not None:
        with naming_cure(json, "--json file"):
            write_record(json, found)
    if picture is not None:
        with naming_cure(picture, "--plot file"):
            draw([found], picture)


if __name__ == "__main__":
    sys.exit(main())
