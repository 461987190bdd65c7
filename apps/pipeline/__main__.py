"""Train a character model in pipeline stages on all ranks of an MPI job.

``mpirun -n 4 python -m apps.pipeline --stages 4 --forward-bits 3 --backward-bits 6 --json run.json --plot run.png``

The exit status is 0 if the run ended, 1 after an error, 2 after a usage error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from mpi4py import MPI

import mpicomp
from apps.pipeline import job
from apps.pipeline.options import Options, parse
from apps.pipeline.plot import draw
from apps.pipeline.report import Report
from apps.pipeline.text import Corpus
from apps.pipeline.training import Training
from apps.records import Record, write_record
from apps.train import checkpoint
from apps.train.agreement import JobError, fail, naming_cure, on_rank_0, raise_on_all_ranks
from apps.train.options import differing
from collectives import Communicator
from collectives.errors import CollectiveError, CollectiveMismatch
from mpicomp.pipeline import PipelineError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; collective over all ranks of the job. Returns the exit status."""
    mpicomp.install_abort_hook()
    try:
        found = on_rank_0(lambda: parse(argv))
    except SystemExit as stop:
        return fail(MPI.COMM_WORLD, None, status=int(stop.code or 0))
    torch.set_num_threads(1)  # more of them would fight over the cores, and change the order of sums
    with Communicator() as comm:
        try:
            train(found.options, comm, found)
        except (JobError, PipelineError, CollectiveMismatch) as error:
            return fail(comm.mpi_comm, str(error))
        except CollectiveError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            comm.mpi_comm.Abort(1)
    return 0


def train(options: Options, comm: Communicator, paths: object) -> None:
    """Train as the options say; collective. Unusable options, texts or checkpoints raise JobError on every rank."""
    folder: Path | None = getattr(paths, "checkpoint", None)
    with raise_on_all_ranks(comm):
        corpus, weights = job.corpus_of(options), job.weights_of(options)
    if folder is not None:
        checkpoint.require_writable(folder, comm)
    try:
        training = Training(options, comm, corpus, None if folder is None else folder / "stores", weights)
    except ValueError as error:  # all ranks have the same options and text, and so the same error
        raise JobError(str(error)) from error
    try:
        _run(training, comm, corpus, paths)
    finally:
        training.close()


def _run(training: Training, comm: Communicator, corpus: Corpus, paths: object) -> None:
    folder: Path | None = getattr(paths, "checkpoint", None)
    epochs: list[Record] = []
    start = time.perf_counter()
    report = Report(comm.rank == 0, training.options, training.steps_per_epoch)
    with report:
        if folder is not None:
            epochs = _resumed(training, comm, folder, report) if getattr(paths, "resume", False) else []
            if not epochs and checkpoint.checkpoints(folder):
                raise JobError(f"{folder} holds checkpoints of an earlier run; add --resume or name another folder")
        last = min(training.options.epochs, getattr(paths, "stop_after", None) or training.options.epochs)
        while training.epoch < last:
            epochs.append(training.train_epoch(report.advance))
            report.epoch(epochs[-1])
            if folder is not None:
                state = {**training.state_dict(), "epochs": epochs}
                checkpoint.save(folder, comm, training.epoch, training.options.identity(), {}, state)
        found = job.record(training, epochs, corpus.digest) | {"seconds": time.perf_counter() - start}
        report.result(found)
    save: Path | None = getattr(paths, "save", None)
    if save is not None:
        with raise_on_all_ranks(comm), naming_cure(save, "--save file"):
            job.save_weights(training, save, comm.rank == 0)
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            _write(found, getattr(paths, "json", None), getattr(paths, "plot", None))


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
