"""``mpicomp warm`` compiles all kernels once for a machine, so that no job has to.

Under ``mpirun`` the ranks of a node share the work, and each node compiles for itself unless they share the cache.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

from collectives import TopologyName
from mpicomp import algorithms
from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.aggregator.registration import REGISTERED
from mpicomp.aggregator.rehearsal import WARM, rehearse
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.cli.command import Steps
from mpicomp.codecs import Draw, RowQuantizer, TopRows
from mpicomp.kernels.cache_folder import CACHE
from mpicomp.kernels.streams import Stream

FORMS: tuple[Algorithm, ...] = (
    *(one.kind(**options) for one in REGISTERED.values() for options in one.forms),
    algorithms.PerNode(algorithms.Dense()),
)
DTYPES = ("float32", "float64", "float16", "bfloat16")
SHORT, LONG = 1 << 10, 1 << 18  # gathered, and merged on the way
ROUTES: tuple[tuple[int, int, TopologyName], ...] = (  # ranks, elements, topology
    (1, SHORT, "auto"),
    (2, SHORT, "auto"),
    (3, SHORT, "auto"),
    (3, LONG, "auto"),
    (4, LONG, "star"),
)
ROWS = "rows of pipelines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Do nothing: the command has no options."""


def run(args: argparse.Namespace) -> int:
    """Compile the kernels that this machine lacks, and return 0 unless they cannot be kept."""
    world = MPI.COMM_WORLD
    start, before = time.perf_counter(), CACHE.count()
    if not all(CACHE.has(WARM + dtype) for dtype in DTYPES):
        work: list[Algorithm | str] = [*FORMS, ROWS]
        first = world.rank * len(work) // world.size  # ranks begin at different forms, and share the work
        with Steps("mpicomp warm", len(work), world.rank == 0) as steps:
            for form in (*work[first:], *work[:first]):
                steps.begin(f"kernels of {type(form).__name__}" if isinstance(form, Algorithm) else form)
                warm_method(form) if isinstance(form, Algorithm) else warm_rows()
        for dtype in DTYPES:
            CACHE.write(WARM + dtype, b"")
    problem = CACHE.problem
    if world.rank == 0:
        if problem:
            print(f"mpicomp warm: {problem}", file=sys.stderr, flush=True)
        made, seconds = CACHE.count() - before, time.perf_counter() - start
        print(f"{made} kernels compiled in {seconds:.0f} s, {CACHE.count()} in {CACHE.folder}", flush=True)
    return int(bool(problem))


def warm_method(method: Algorithm) -> None:
    """Compile the kernels of a method for every dtype."""
    for dtype in DTYPES:
        for ranks, n, topology in ROUTES:
            rehearse(method, VectorSpec(n, dtype), ranks, topology, with_moves=True)


def warm_rows() -> None:
    """Compile the kernels of activations and their gradients."""
    rows, keys = np.random.default_rng(0).standard_normal((4, 64), np.float32), np.arange(4)
    draw = Draw(Stream(0, 0, "rows"), 0, 0)
    for codec in (RowQuantizer(4), RowQuantizer(2, "stochastic"), TopRows(0.2, RowQuantizer(8))):
        payload = np.zeros(codec.nbytes(*rows.shape), np.uint8)
        codec.encode(rows, payload, draw, keys)
        codec.decode(payload, np.empty_like(rows))
        if isinstance(codec, RowQuantizer):
            codec.encode_delta(rows, np.zeros_like(rows), payload, draw, keys)
            codec.decode_delta(payload, np.zeros_like(rows))
