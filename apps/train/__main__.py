"""Train an image classifier on all ranks of an MPI job.

``mpirun -n 4 python -m apps.train --dataset digits --method marsit --topology ring --epochs 5 --json run.json``

Without ``mpirun`` it trains on one rank. The exit status is 0 if the run ended, or if SIGTERM or SIGUSR1 made it save a
checkpoint and stop, as its last line then says (``--resume`` continues); 1 after an error; 2 after a usage error; 3 if
training diverged to NaN or infinity.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

import mpicomp
from apps.train.agreement import LAST_RANK_S, JobError, any_rank, fail, on_rank_0, raise_on_all_ranks
from apps.train.checkpoint import require_writable
from apps.train.data import load
from apps.train.options import ONE_BIT_ADAM, parse
from apps.train.report import STATUS_DIVERGED, Report
from apps.train.saver import Saver, require_unused, resume
from apps.train.training import Training, device_of
from collectives import Communicator
from collectives.errors import CollectiveError, CollectiveMismatch, NonFiniteGradient
from collectives.recovery.newcomers import is_waiting, newcomers_of
from mpicomp.algorithms import Algorithm

_STAGGER_S = 0.2
"""Seconds between two ranks that print errors of their own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; collective over all ranks of the job. Returns the exit status."""
    mpicomp.install_abort_hook()
    try:
        options = on_rank_0(lambda: parse(argv))
    except SystemExit as stop:
        return fail(MPI.COMM_WORLD, None, status=int(stop.code or 0))
    # More threads than one per rank would fight over the cores, and change the order of sums.
    torch.set_num_threads(1)
    try:
        comm = Communicator(
            topology=options.topology,
            timeout=options.timeout,
            trace=options.trace,
            network=options.network,
            arrival_timeout=options.arrival_timeout,
            threads=options.threads,
            link=options.link,
            ranks_per_node=options.ranks_per_node,
            on_failure=options.on_failure,
            spares=options.spares,
        )
    except ValueError as error:
        network = "" if options.network is None else f" --network {options.network}"
        network += "" if options.link is None else f" --link {options.link}"
        network += "" if options.on_failure == "raise" else f" --on-failure {options.on_failure}"
        network += "" if not options.spares else f" --spares {options.spares}"
        return fail(MPI.COMM_WORLD, f"--topology {options.topology}{network}: {error}")
    except OSError as error:
        return fail(MPI.COMM_WORLD, f"--trace {options.trace}: {error}")
    with comm:
        try:
            train(options, comm)
        except NonFiniteGradient as error:
            return fail(comm.mpi_comm, f"training diverged: {error}", status=STATUS_DIVERGED)
        except (JobError, CollectiveMismatch) as error:
            return fail(comm.mpi_comm, str(error))
        except CollectiveError as error:
            if comm.recovery is not None:
                raise  # MPI_Abort would end no other rank of a tolerant job
            # Ranks that wait for another one give up at about the same time: the first that prints ends the others.
            time.sleep(min(_STAGGER_S * comm.rank, LAST_RANK_S))
            print(f"error: {error}", file=sys.stderr, flush=True)
            comm.mpi_comm.Abort(1)
    return 0


def train(options: argparse.Namespace, comm: Communicator) -> None:
    """Train with these options; collective. Unusable data, options or checkpoints raise JobError on every rank."""
    with ExitStack() as stack:
        with raise_on_all_ranks(comm):
            dataset, algorithm = load(options.dataset, options.data), _algorithm(options)
            device = device_of(options.device, comm)
        try:
            training = Training(options, comm, dataset, algorithm, device)
        except ValueError as error:
            # All ranks have the same options and data, and so the same error.
            raise JobError(str(error)) from error
        saver, resumed = None, None
        if options.checkpoint is not None:
            if not is_waiting(comm):  # such a rank touches no files, and gets its state from a member
                require_writable(options.checkpoint, comm)
                if options.resume:
                    resumed = resume(options, comm, training)
                else:
                    require_unused(options, comm)
            saver = Saver(options, comm, training)
        with raise_on_all_ranks(comm):
            report = Report(comm, options.json, partial(_header, options, comm, training), training.epoch)
        stack.enter_context(report)
        if resumed is not None:
            report.print_line(f"resumed from {resumed}")
        try:
            _run(options, comm, training, saver, report)
        except NonFiniteGradient:
            report.diverged(training.epoch + 1)
            raise


def _run(
    options: argparse.Namespace, comm: Communicator, training: Training, saver: Saver | None, report: Report
) -> None:
    def after_step() -> bool:
        report.advance(training.n_steps, training.position)
        return saver is not None and saver.after_step()

    def counters() -> tuple[dict[str, Any], int | None]:
        return training.counters(), None if saver is None else saver.last_step

    def adopt(member: tuple[dict[str, Any], int | None]) -> None:
        training.adopt(member[0])
        if saver is not None and member[1] is not None:
            saver.last_step = member[1]

    def admit() -> int:
        """Let ranks that wait take the places of dead ones; a rank that waits returns once it has joined."""
        return training.optimizer.admit(training.model, counters, adopt)

    before_step = None if newcomers_of(comm) is None else admit
    report.begin(options.algorithm, training.n_steps, training.position)
    while training.epoch < options.epochs:
        if not training.train_epoch(after_step, before_step):
            report.print_line(f"stopped by a signal after step {training.step}; continue with --resume")
            return
        record = training.close_epoch()
        _record(comm, partial(report.epoch, record, options.epochs))
        if saver is not None:
            saver.after_epoch()
    _record(comm, partial(report.result, training.result()))


def _record(comm: Communicator, write: Callable[[], None]) -> None:
    """Let rank 0 write a record, or a new rank 0 if that one dies before all ranks know that it has; collective."""
    while True:
        with raise_on_all_ranks(comm):
            is_writer = comm.rank == 0
            write()
        if any_rank(comm, is_writer):
            return


def _header(options: argparse.Namespace, comm: Communicator, training: Training) -> dict[str, Any]:
    """The fields that every line of the record has, so that each can be read alone."""
    chosen = ("algorithm", "algorithm_options", "local_steps", "dataset", "model", "optimizer", "lr", "batch", "seed")
    return {
        **{key: getattr(options, key) for key in chosen},
        "synchronize": training.optimizer.mode,
        "topology": getattr(comm.topology, "name", comm.topology),
        "ranks": comm.size,
        "link": None if comm.link is None else str(comm.link),
        "per_node": options.per_node,
        "nodes": list(comm.layout.sizes),
        "count": training.n_parameters,
    }


def _algorithm(options: argparse.Namespace) -> Algorithm | None:
    """The method; None stands for the optimizer that is a method of its own."""
    if options.algorithm == ONE_BIT_ADAM:
        return None
    try:
        algorithm = mpicomp.algorithm(options.algorithm, **options.algorithm_options)
        return algorithm if options.per_node is None else mpicomp.PerNode(algorithm, options.per_node)
    except TypeError as error:
        raise ValueError(f"--method {options.algorithm} takes no such option: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
