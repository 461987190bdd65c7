"""A function that runs on the ranks: the bytes that methods send, and the fraction of their results that is not 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from apps.records import Record
from apps.reproduce.networks import heavy_tailed
from collectives import Communicator
from mpicomp.algorithms import ALGORITHMS, Algorithm
from mpicomp.cli.timing import gather


def measure_all(steps: int, methods: dict[str, Record]) -> Record:
    """Run steps of each method; see `measure`."""
    with Communicator(topology="ring") as comm:
        return {key: measure(comm, steps, **asked) for key, asked in methods.items()}


def measure(
    comm: Communicator, steps: int, name: str, options: Record, n: int, tensor_lengths: list[int] | None = None
) -> Record:
    """Run steps of one method, which has this name on the command line; collective.

    Returns
    -------
    dict
        ``bytes``: handed to MPI per step, mean over ranks. ``busiest``: of the rank that sends most. ``filled``: the
        fraction of the result's elements that are not 0. The first step does not count.
    """
    method: Algorithm = ALGORITHMS[name](**options)
    aggregator: Any = method.start(comm, n, tensor_lengths=tensor_lengths)
    filled = []
    before = 0
    for step in range(steps + 1):
        result = aggregator.aggregate(heavy_tailed(n, comm.rank, step, (0,)))
        if step == 0:
            before = aggregator.traffic.total.bytes_sent
        else:
            filled.append(np.count_nonzero(result) / max(1, n))
    sent = gather(comm, np.array([(aggregator.traffic.total.bytes_sent - before) / steps]))
    return {"bytes": float(sent.mean()), "busiest": float(sent.max()), "filled": float(np.mean(filled))}
