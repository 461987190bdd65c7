"""Options of ``mpicomp bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mpicomp.algorithms import NAMES
from mpicomp.algorithms.per_node import LOCALS
from mpicomp.cli.arguments import DTYPES
from mpicomp.cli.bench.vectors import DEVICES

ALLREDUCE = "allreduce"  # not a method: Communicator.allreduce itself, a dense sum
BASELINES = ("mpi", "dense", "none")
Add = Callable[..., object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp bench``. Their values are read in `run`, where one rank can speak for all."""
    _add_subject(parser.add_argument)
    _add_measurement(parser.add_argument)


def _add_subject(add: Add) -> None:
    """Add the options of the timed methods and their vectors."""
    methods = ", ".join((*NAMES, ALLREDUCE))
    add(
        "--method",
        "--algorithm",
        dest="algorithm",
        metavar="NAME",
        default="marsit",
        help=f"{methods} (default %(default)s)",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the method, such as full_precision_every=None",
    )
    add(
        "--per-node",
        nargs="?",
        const="auto",
        metavar="LOCAL",
        help=f"full precision within a node and the method between nodes; LOCAL: way of the sums within, "
        f"{', '.join(LOCALS)} (default auto)",
    )
    add("--ranks-per-node", metavar="L", help="let groups of L neighbouring ranks of a host count as a node")
    add("--topology", default="auto", help="schedule of the all-reduce, by name (default %(default)s)")
    add("--network", metavar="FILE", help='network for topology "auto", from mpicomp advise --save')
    add(
        "--link",
        metavar="RATE[,LATENCY]",
        help="emulate slow links: hold messages back until a link of this rate, such as 100mbit or 1gbit,50us, would "
        "deliver them",
    )
    add(
        "--count", default="25e6", help="elements: 25e6, or several as 1e3,1e6, or min:max:factor (default %(default)s)"
    )
    add("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default %(default)s)")
    add(
        "--device",
        default="cpu",
        help=f"{', '.join(DEVICES)}: memory of the vectors. The GPUs of a node are assigned to its ranks in turn; "
        "methods encode there if they can, and the baseline goes through the host's memory (default %(default)s)",
    )


def _add_measurement(add: Add) -> None:
    """Add the options of the timing and its output."""
    add(
        "--baseline",
        default="mpi",
        help=f"{', '.join(BASELINES)}: all-reduce to compare with, timed in turn: MPI_Allreduce, or the dense mean "
        "over the same topology (default %(default)s)",
    )
    add("--repeats", default="20", help="timed calls of each (default %(default)s)")
    add("--warmup", default="3", help="calls of each before the timed ones (default %(default)s)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="check results before and after timing")
    add("--seed", default="0", help="seed of the vectors (default %(default)s)")
    add("--threads", default="1", help="threads of each rank, which encode and decode pieces (default %(default)s)")
    add("--timeout", default="60", help="seconds to wait for a silent rank (default %(default)s)")
    add("--json", metavar="FILE", help="write one JSON line per vector length")
    add("--trace", metavar="DIR", help="write a trace of each rank's calls, for mpicomp trace")
    add(
        "--report",
        nargs="?",
        const="mpicomp-report",
        metavar="FILE-STEM",
        help="measure links, main methods and a training step; write FILE-STEM.json and .md, without names of hosts, "
        "users and paths; goes by --minutes and --timeout alone (default mpicomp-report)",
    )
    add("--minutes", help="time that --report may take (default 5)")
