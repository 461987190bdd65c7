"""``mpicomp demo`` trains a small model over slow links, dense and with Marsit, and shows the difference.

It needs the package alone: ranks are threads, which need no MPI library, and the text to learn from is that of Python's
standard library. Under ``mpirun`` the ranks are those of MPI.

The exit status is 0, or 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module

from collectives.missing_mpi import mpi_problem

COMMAND = "mpicomp demo"
RANKS, STEPS, LINK, PICTURE = 4, 60, "100mbit", "mpicomp-demo.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp demo``. Their values are read in `run`, where one rank can report for all."""
    add = parser.add_argument
    add(
        "--link",
        metavar="RATE[,LATENCY]",
        default=LINK,
        help="link of each rank that is emulated, such as 1gbit or 1gbit,50us; none: as fast as messages travel "
        "(default %(default)s)",
    )
    add("--ranks", help=f"threads that train; under mpirun there are its ranks (default {RANKS})")
    add("--steps", default=str(STEPS), help="training steps of each method (default %(default)s)")
    add("--seed", default="0", help="seed of weights and batches (default %(default)s)")
    add("--output", metavar="FILE", default=PICTURE, help="picture to write: .png, .svg or .pdf (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train, print the table and write the picture; return the exit status."""
    # As many ranks compute as there are cores. NumPy reads the variable when it is imported, by the next lines.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missing = ""
    try:
        import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        missing = mpi_problem(error)
        if not missing:
            raise
        import_module("collectives.threads.without_mpi").stand_in_for_mpi()
    return int(import_module("mpicomp.cli.demo.program").run(args, missing))
