"""What `mpicomp bench` is asked to time, read from its arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import mpicomp
from collectives.execution.workers import MOST_THREADS
from mpicomp.algorithms import NAMES, Algorithm
from mpicomp.cli.arguments import DTYPES, choice, counts, integer, seconds
from mpicomp.cli.bench.gpus import DEVICES
from mpicomp.cli.main import assignment

ALLREDUCE = "allreduce"  # not a method: Communicator.allreduce itself, a dense sum
BASELINES = ("mpi", "dense", "none")


@dataclass(frozen=True)
class Request:
    """Parsed arguments."""

    name: str
    algorithm: Algorithm | None  # None: `Communicator.allreduce`
    options: dict[str, Any]  # of the algorithm, as given
    counts: tuple[int, ...]  # elements of each vector
    dtype: str
    device: str
    baseline: str
    repeats: int
    warmup: int
    check: bool
    seed: int
    threads: int
    timeout_s: float

    @classmethod
    def parse(cls, args: argparse.Namespace) -> Request:
        """Read the values of the options; ValueError names one that cannot be used, its value and what it takes."""
        options = dict(map(assignment, args.option))
        return cls(
            args.algorithm,
            _algorithm(args.algorithm, options),
            options,
            counts(args.count),
            choice("--dtype", args.dtype, DTYPES),
            choice("--device", args.device, DEVICES),
            choice("--baseline", args.baseline, BASELINES),
            integer("--repeats", args.repeats, 1),
            integer("--warmup", args.warmup, 0),
            args.check,
            integer("--seed", args.seed, 0),
            integer("--threads", args.threads, 1, MOST_THREADS),
            seconds("--timeout", args.timeout),
        )


def _algorithm(name: str, options: dict[str, Any]) -> Algorithm | None:
    if name == ALLREDUCE:
        if options:
            raise ValueError(f"--algorithm {ALLREDUCE} has no options, not {', '.join(options)}")
        return None
    choice("--algorithm", name, (*NAMES, ALLREDUCE))
    try:
        return mpicomp.algorithm(name, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--algorithm {name} cannot be made with these options: {error}") from error
