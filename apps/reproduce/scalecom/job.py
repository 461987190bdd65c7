"""What runs on the ranks: bytes that each method sends for vectors of one length, and how full the result is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import ALGORITHMS, Algorithm
from mpicomp.cli.timing import gather


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the request says; rank 0 writes what was found.

    The request has ``steps`` and ``methods``: of each its ``name`` on the command line, ``options``, ``n``, its
    vector's length, and ``segments``, the lengths of the tensors in it, or None.
    """
    mpicomp.install_abort_hook()
    request = json.loads(Path((sys.argv[1:] if argv is None else argv)[0]).read_text())
    with Communicator(topology="ring") as comm:
        found = {key: measure(comm, request["steps"], asked) for key, asked in request["methods"].items()}
        if comm.rank == 0:
            Path(request["path"]).write_text(json.dumps(found))
    return 0


def measure(comm: Communicator, steps: int, asked: Record) -> Record:
    """Steps of one method.

    Returns
    -------
    dict
        ``bytes``: that a rank handed to MPI a step, mean over ranks; ``busiest``: of the rank with most; ``filled``:
        which part of the result's elements are not 0. The first step does not count.
    """
    method: Algorithm = ALGORITHMS[asked["name"]](**asked["options"])
    n = asked["n"]
    aggregator: Any = method.start(comm, n, tensor_lengths=asked["segments"])
    filled = []
    before = 0
    for step in range(steps + 1):
        result = aggregator.aggregate(gradient(n, comm.rank, step))
        if step == 0:
            before = aggregator.traffic.total.bytes_sent
        else:
            filled.append(np.count_nonzero(result) / max(1, n))
    sent = gather(comm, np.array([(aggregator.traffic.total.bytes_sent - before) / steps]))
    return {"bytes": float(sent.mean()), "busiest": float(sent.max()), "filled": float(np.mean(filled))}


def gradient(n: int, rank: int, step: int) -> NDArray[np.float32]:
    """A rank's: heavy-tailed, and a part of it the same on all ranks at all steps."""
    common = np.random.default_rng((0,)).standard_t(3, n)
    return (common + np.random.default_rng((1, step, rank)).standard_normal(n)).astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())
