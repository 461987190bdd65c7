"""Options of ``mpicomp bench``."""

from __future__ import annotations

import argparse

from mpicomp.algorithms import NAMES
from mpicomp.algorithms.per_node import LOCALS
from mpicomp.cli.arguments import DTYPES
from mpicomp.cli.bench.vectors import DEVICES

ALLREDUCE = "allreduce"  # not a method: Communicator.allreduce itself, a dense sum
BASELINES = ("mpi", "dense", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp bench``. Their values are read in `run`, where one rank can speak for all."""
    methods = ", ".join((*NAMES, ALLREDUCE))
    parser.add_argument(
        "--method",
        "--algorithm",
        dest="algorithm",
        metavar="NAME",
        default="marsit",
        help=f"{methods} (default %(default)s)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the method, such as full_precision_every=None",
    )
    parser.add_argument(
        "--per-node",
        nargs="?",
        const="auto",
        metavar="LOCAL",
        help=f"full precision within a node and the method between nodes; LOCAL: way of the sums within, "
        f"{', '.join(LOCALS)} (default auto)",
    )
    parser.add_argument(
        "--ranks-per-node", metavar="L", help="let groups of L neighbouring ranks of a host count as a node"
    )
    parser.add_argument("--topology", default="auto", help="schedule of the all-reduce, by name (default %(default)s)")
    parser.add_argument("--network", metavar="FILE", help='network for topology "auto", from mpicomp advise --save')
    parser.add_argument(
        "--link",
        metavar="RATE[,LATENCY]",
        help="emulate slow links: hold messages back until a link of this rate, such as 100mbit or 1gbit,50us, would "
        "deliver them",
    )
    parser.add_argument(
        "--count", default="25e6", help="elements: 25e6, or several as 1e3,1e6, or min:max:factor (default %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default %(default)s)")
    parser.add_argument(
        "--device",
        default="cpu",
        help=f"{', '.join(DEVICES)}: memory of the vectors. The GPUs of a node are assigned to its ranks in turn; "
        "methods encode there if they can, and the baseline goes through the host's memory (default %(default)s)",
    )
    parser.add_argument(
        "--baseline",
        default="mpi",
        help=f"{', '.join(BASELINES)}: all-reduce to compare with, timed in turn: MPI_Allreduce, or the dense mean "
        "over the same topology (default %(default)s)",
    )
    parser.add_argument("--repeats", default="20", help="timed calls of each (default %(default)s)")
    parser.add_argument("--warmup", default="3", help="calls of each before the timed ones (default %(default)s)")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="check results before and after timing"
    )
    parser.add_argument("--seed", default="0", help="seed of the vectors (default %(default)s)")
    parser.add_argument(
        "--threads", default="1", help="threads of each rank, which encode and decode pieces (default %(default)s)"
    )
    parser.add_argument("--timeout", default="60", help="seconds to wait for a silent rank (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write one JSON line per vector length")
    parser.add_argument("--trace", metavar="DIR", help="write a trace of each rank's calls, for mpicomp trace")
    parser.add_argument(
        "--report",
        nargs="?",
        const="mpicomp-report",
        metavar="FILE-STEM",
        help="measure links, main methods and a training step; write FILE-STEM.json and .md, without names of hosts, "
        "users and paths; goes by --minutes and --timeout alone (default mpicomp-report)",
    )
    parser.add_argument("--minutes", help="time that --report may take (default 5)")
