"""Measurements of ``mpicomp bench --report`` on all ranks, within a budget of time.

All decisions follow the clock of rank 0 and the times of the slowest rank, so that all ranks make the same calls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives import CollectiveError, Communicator
from collectives.network_probe import measure_network
from mpicomp.cli.arguments import number, seconds
from mpicomp.cli.bench.measure import aggregated, allreduce, checked_call
from mpicomp.cli.bench.options import add_arguments
from mpicomp.cli.bench.vectors import make_vectors
from mpicomp.cli.cluster_report import markdown, training
from mpicomp.cli.cluster_report.machine import describe_job, free_bytes
from mpicomp.cli.cluster_report.open_mpi_algorithms import SETTINGS, AllreduceAlgorithm, ToolsError
from mpicomp.cli.cluster_report.progress import Progress
from mpicomp.cli.cluster_report.rounds import FEWEST, Budget, rounded, timed_rounds, with_median
from mpicomp.cli.cluster_report.validation import COMPRESSED
from mpicomp.cli.command import UsageError, conduct, open_file, write
from mpicomp.cli.timing import elapsed, slowest

COMMAND = "mpicomp bench --report"
SIZES = (1_000_000, 16_000_000, 100_000_000, 400_000_000)  # bytes of a vector
METHODS = {"marsit": mpicomp.Marsit(None), "relay": mpicomp.Relay(levels=4)}
# By number and segment size of Open MPI. Its segmented ring is the ring without a segment size.
ALGORITHMS = {
    "MPI recursive doubling": (3, 0),
    "MPI ring": (4, 0),
    "MPI segmented ring": (5, 1 << 20),
    "MPI Rabenseifner": (6, 0),
}
VECTORS_IN_MEMORY = 9  # input, output, two residuals of each method at most, buffers of MPI
MEMORY_PART = 0.7
TRAINING_PART = 0.2  # of the time
LEAST_MINUTES = 0.05
DEFAULT_MINUTES = "5"
OWN = ("report", "minutes", "timeout")  # options that --report goes by


def run(args: argparse.Namespace) -> int:
    """Measure and write a report; return the exit status, the same on every rank."""
    return conduct(COMMAND, lambda: _start(args), lambda minutes, comm: _run(args.report, minutes, comm))


def _start(args: argparse.Namespace) -> tuple[float, Communicator]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = [name for name, default in vars(parser.parse_args([])).items() if getattr(args, name) != default]
    others = ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in OWN)
    if others:
        raise UsageError(f"--report measures the same things everywhere, and has no {others}: leave it out")
    try:
        minutes = number("--minutes", args.minutes or DEFAULT_MINUTES, LEAST_MINUTES)
        timeout_s = seconds("--timeout", args.timeout)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if MPI.COMM_WORLD.size == 1:
        raise UsageError("one rank sends nothing: start two or more, as in mpicomp run -n 2 -m mpicomp bench --report")
    return minutes, Communicator(topology="ring", timeout=timeout_s, arrival_timeout=timeout_s)


def _run(stem: str, minutes: float, comm: Communicator) -> int:
    stem = stem.removesuffix(".json")
    option = f"--report {stem}"
    with (
        open_file(comm, option, f"{stem}.json") as json_file,
        open_file(comm, option, f"{stem}.md") as text_file,
        Progress(f"{comm.size} ranks", 60 * minutes, comm.rank == 0) as progress,
    ):
        report = measure(comm, minutes, progress)
        write(comm, option, json_file, to_json(report))
        write(comm, option, text_file, markdown.page(report))
    if comm.rank == 0:
        print(
            f"{markdown.page(report)}\nwritten: {stem}.json, {stem}.md; to share it: mpicomp report check {stem}.json"
        )
    return 0


def measure(comm: Communicator, minutes: float, progress: Progress) -> dict[str, Any]:
    """Return the report; collective.

    Raises
    ------
    CollectiveError
        A result was wrong, or communication failed.
    """
    budget, job = Budget(comm, 60 * minutes), describe_job(comm)
    progress.begin("links")
    network = measure_network(comm)
    with ExitStack() as stack:
        connect = partial(Communicator, network=network, timeout=comm.timeout, arrival_timeout=comm.timeout)
        auto = stack.enter_context(connect())
        algorithms = forced_algorithms(comm)
        for forced in algorithms.values():
            stack.callback(forced.Free)
        n_calls = 3 + len(METHODS) + len(algorithms)
        progress.n_done, progress.n_measurements = 1, 1 + len(SIZES) * n_calls + len(training.STEPS)
        found: list[dict[str, Any]] = []
        for nbytes in SIZES[:-1]:
            found.append(_size(comm, auto, algorithms, nbytes, found, budget, progress))
            progress.n_done = 1 + len(found) * n_calls
        # before the longest vector, which may use up the time
        dense_s = _expected(["dense ring"], 4 * training.PARAMETERS, found)["dense ring"]
        trained = training.measure(comm, connect, dense_s, budget, progress)
        progress.n_done = 1 + len(found) * n_calls + len(training.STEPS)
        found.append(_size(comm, auto, algorithms, SIZES[-1], found, budget, progress))
    return {
        "schema": 1,
        "date": datetime.now(UTC).date().isoformat(),
        **job,
        "network": {name: value and rounded(value) for name, value in asdict(network).items()},
        "allreduce": found,
        "training": trained,
        "budget_minutes": minutes,
        "took_seconds": round(budget.elapsed_s(), 1),
    }


def forced_algorithms(comm: Communicator) -> dict[str, MPI.Comm]:
    """Return communicators on which Open MPI uses one algorithm each; none with another MPI library; collective."""
    algorithm = None
    # AttributeError, OSError: a library without these functions
    with suppress(ToolsError, AttributeError, OSError):
        if SETTINGS.items() <= os.environ.items():  # else Open MPI does not read the numbers
            algorithm = AllreduceAlgorithm()
    if not all(comm.allgather_object(algorithm is not None)) or algorithm is None:
        return {}
    return {name: algorithm.dup(comm.mpi_comm, *numbers) for name, numbers in ALGORITHMS.items()}


def _size(
    comm: Communicator,
    auto: Communicator,
    algorithms: Mapping[str, MPI.Comm],
    nbytes: int,
    before: list[dict[str, Any]],
    budget: Budget,
    progress: Progress,
) -> dict[str, Any]:
    """Return the entry of a size of vectors; collective."""
    names = ["dense ring", "dense auto", "MPI default", *algorithms, *METHODS]
    progress.begin(f"all-reduce of {nbytes / 1e6:g} MB")
    left_s = (1 - TRAINING_PART) * budget.left_s()
    expected_s = _fitting(_expected(names, nbytes, before), algorithms, left_s / (1 + FEWEST))
    lacks_memory = any(comm.allgather_object(VECTORS_IN_MEMORY * nbytes * comm.local_size > MEMORY_PART * free_bytes()))
    entry: dict[str, Any] = {"bytes": nbytes, "skipped": None, "best_dense": None, "calls": []}
    if before and (lacks_memory or sum(expected_s.values()) > left_s / (1 + FEWEST)):
        return entry | {"skipped": "memory" if lacks_memory else "time"}
    vectors = make_vectors(comm, nbytes // 4, "float32", None)
    vectors.fill(0, comm.rank)
    subjects = {"dense ring": allreduce(comm), "dense auto": allreduce(auto)}
    subjects |= {name: aggregated(method, auto, vectors.x) for name, method in METHODS.items()}
    for name, subject in () if before else subjects.items():
        if problem := checked_call(comm, subject, vectors):
            raise CollectiveError(f"{comm.here}: {name} gives a wrong result: {problem}; report this as a bug")
    functions: dict[str, Callable[..., object]] = {name: subject.call for name, subject in subjects.items()}
    functions |= {name: algorithms.get(name, comm.mpi_comm).Allreduce for name in names if name not in subjects}
    calls = {name: partial(functions[name], vectors.x, vectors.out) for name in expected_s}
    before_bytes = {name: subject.traffic.bytes_sent for name, subject in subjects.items()}
    warm_ups = slowest(np.array([elapsed(call, comm) for call in calls.values()]), comm).tolist()
    sent = {
        name: round(sum(comm.allgather_object(subject.traffic.bytes_sent - before_bytes[name])) / comm.size)
        for name, subject in subjects.items()
    }
    share_s = left_s / (len(SIZES) - len(before))
    kept = _fitting(dict(zip(calls, warm_ups, strict=True)), algorithms, share_s / FEWEST)
    if before and sum(kept.values()) > budget.left_s():
        return entry | {"skipped": "time"}
    timed = timed_rounds({name: calls[name] for name in kept}, comm, share_s, budget, progress)
    rows = [
        {"name": name, **with_median(times), "bytes_sent_per_rank": sent.get(name)} for name, times in timed.items()
    ]
    dense = {row["name"]: row["median_s"] for row in rows if row["name"] not in COMPRESSED}
    return entry | {"best_dense": min(dense, key=lambda name: dense[name]), "calls": rows}


def _fitting(expected_s: Mapping[str, float], optional: Collection[str], limit_s: float) -> dict[str, float]:
    """Return the calls that fit into a time, without the slowest optional ones; the fastest of these stays."""
    kept = dict(expected_s)
    while sum(kept.values()) > limit_s and len(droppable := [name for name in kept if name in optional]) > 1:
        del kept[max(droppable, key=lambda name: kept[name])]  # not of a set, whose order differs between ranks
    return kept


def _expected(names: list[str], nbytes: int, before: list[dict[str, Any]]) -> dict[str, float]:
    """Return the expected seconds of a call of each, in proportion to the last size; 0 for the first size."""
    last = next((entry for entry in reversed(before) if entry["calls"]), None)
    if last is None:
        return dict.fromkeys(names, 0.0)
    return {row["name"]: row["median_s"] * nbytes / last["bytes"] for row in last["calls"]}


def to_json(report: Mapping[str, Any]) -> str:
    """Return JSON with one line for each list of numbers."""
    return (
        re.sub(
            r"\[\s+([^\[\]{}]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(report, indent=1)
        )
        + "\n"
    )
