"""``mpirun -n 2 python -m apps.performance.step_path``: the files whose functions one warm step calls, in their order.

Files of `collectives` and `mpicomp` count, kernels do not. Rank 0 prints the path as it is traced by `sys.setprofile`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import mpicomp
from apps.launch import PROJECT
from mpicomp.algorithms import Algorithm

WARM_UPS = 3
FOLDERS = ("collectives/", "mpicomp/")


def called_files(method: Algorithm, comm: mpicomp.Communicator, n: int) -> Counter[str]:
    """Return how many functions of each file a warm step calls, in the order of their first calls."""
    vector = np.random.default_rng(comm.rank).standard_normal(n, np.float32)
    aggregator, out = method.start(comm, n), np.empty(n, np.float32)
    for _ in range(WARM_UPS):
        aggregator.aggregate(vector, out)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PROJECT):
            calls[str(path.relative_to(PROJECT))] += 1

    sys.setprofile(count)
    aggregator.aggregate(vector, out)
    sys.setprofile(None)
    return Counter(
        {path: found for path, found in calls.items() if path.startswith(FOLDERS) and "/kernels/" not in path}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the path of a step of each method; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m apps.performance.step_path", description=__doc__)
    names = sorted(mpicomp.ALGORITHMS)
    parser.add_argument(
        "--method", "--algorithm", dest="algorithm", default="marsit", choices=names, help="default: marsit"
    )
    parser.add_argument("--count", type=int, default=1 << 20, help="elements; default: 1048576")
    options = parser.parse_args(argv)
    with mpicomp.Communicator() as comm:
        files = called_files(mpicomp.algorithm(options.algorithm), comm, options.count)
        if comm.rank == 0:
            print(f"{options.algorithm}, {options.count} elements, {comm.size} ranks: {len(files)} files")
            for path, calls in files.items():
                print(f"{calls:5} {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
