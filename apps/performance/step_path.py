"""``mpirun -n 2 python -m apps.performance.step_path``: the files or functions of a warm step, in the order of calls.

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


def called(method: Algorithm, comm: mpicomp.Communicator, n: int, functions: bool = False) -> Counter[str]:
    """Return the calls in each file, or of each of its `functions`, of a warm step, in the order of the first ones."""
    vector = np.random.default_rng(comm.rank).standard_normal(n, np.float32)
    aggregator, out = method.start(comm, n), np.empty(n, np.float32)
    for _ in range(WARM_UPS):
        aggregator.aggregate(vector, out)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PROJECT):
            calls[f"{path.relative_to(PROJECT)}{f' {frame.f_code.co_qualname}' if functions else ''}"] += 1

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
    parser.add_argument("--functions", action="store_true", help="list functions instead of files")
    options = parser.parse_args(argv)
    with mpicomp.Communicator() as comm:
        found = called(mpicomp.algorithm(options.algorithm), comm, options.count, options.functions)
        if comm.rank == 0:
            parts = "functions" if options.functions else "files"
            print(f"{options.algorithm}, {options.count} elements, {comm.size} ranks: {len(found)} {parts}")
            for path, calls in found.items():
                print(f"{calls:5} {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
