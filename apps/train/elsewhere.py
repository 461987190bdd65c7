"""Predicted time of a run on a cluster: computing as it was here, and synchronizations by the model of `advise`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from apps.mpi_jobs import call_on_ranks
from apps.records import Record
from collectives import Communicator, LinkModel, Ring, topology
from collectives.cost.link import ComputeModel
from collectives.network_probe import measure_network
from mpicomp.algorithms import algorithm
from mpicomp.cli.advise.predict import Job, Way
from mpicomp.cli.advise.speeds import Speed, measure_speed

RATES = {"100 Mbit/s": 100e6 / 8, "1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8}
"""Bytes per second of each rank's link, by name."""
LATENCY_S = 50e-6  # as between hosts on Ethernet; between emulated ones it was 47 to 67 us
DENSE = {"algorithm": "dense", "algorithm_options": {}}


def seconds_elsewhere(runs: Sequence[Record]) -> list[dict[str, float]]:
    """Seconds of each run for each of `RATES`, from the last epoch's record of each; all have the same ranks and model.

    Nodes have a processor for each rank. So it starts a job of no more ranks than this machine has cores, two at least,
    which measures each method's computing. JobFailed if that fails. All runs count with the same computing, the
    median of theirs: it differs by other load of the machine.
    """
    asked = [{key: run[key] for key in DENSE} for run in (DENSE, *runs)]
    ranks = max(2, min(runs[0]["ranks"], len(os.sched_getaffinity(0))))
    measured = call_on_ranks(measure_speeds, {"methods": asked, "n": runs[0]["count"]}, ranks)
    dense, *speeds = (
        Speed(ComputeModel(**found["work"]), found["call_s"], found["volume"]) for found in measured["speeds"]
    )
    computing_s = median(max(0.0, run["seconds_so_far"] - run["seconds_communicating_so_far"]) for run in runs)
    return [
        {rate: computing_s + seconds for rate, seconds in _synchronizing(run, speed, dense, measured["piece_bytes"])}
        for run, speed in zip(runs, speeds, strict=True)
    ]


def measure_speeds(methods: Sequence[dict[str, Any]], n: int) -> Record:
    """Measure each method's computing for vectors of `n` elements on this job's ranks, as `mpicomp advise` does."""
    with Communicator() as comm:
        network = measure_network(comm)
        wanted = [algorithm(method["algorithm"], **method["algorithm_options"]) for method in methods]
        speeds = [measure_speed(comm, one, n, "float32", network) for one in wanted]
        return {"speeds": [asdict(speed) for speed in speeds], "piece_bytes": comm.packed_piece_bytes()}


def _synchronizing(run: Record, speed: Speed, dense: Speed, piece_bytes: int) -> Iterator[tuple[str, float]]:
    """Names of `RATES`, and the seconds that all synchronizations of a run take there."""
    method = algorithm(run["algorithm"], **run["algorithm_options"])
    own = method.message_model(run["count"], "float32", run["ranks"], piece_bytes).route
    chosen = Ring() if run["topology"] in ("auto", "mpi") else topology(run["topology"])
    way = Way(run["algorithm"], method, own or chosen, speed, dense)
    for rate, bytes_s in RATES.items():
        job = Job(run["ranks"], run["count"], "float32", LinkModel(LATENCY_S, bytes_s), piece_bytes)
        yield rate, run["rounds_so_far"] * way.seconds(job)
