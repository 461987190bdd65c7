"""What `mpicomp bench` is asked to time, read from its arguments."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import mpicomp
from mpicomp.algorithms import ALGORITHMS, Algorithm
from mpicomp.cli import assignment

ALLREDUCE = "allreduce"  # not a method: Communicator.allreduce itself, a dense sum
BASELINES = ("mpi", "dense", "none")
DTYPES = ("float16", "float32", "float64")
MOST_COUNTS = 1000


@dataclass(frozen=True)
class Request:
    """Parsed arguments.

    Attributes
    ----------
    algorithm : Algorithm or None
        None: `Communicator.allreduce`.
    options : dict
        Of the algorithm, as given.
    counts : tuple of int
        Elements of each vector.
    """

    name: str
    algorithm: Algorithm | None
    options: dict[str, Any]
    counts: tuple[int, ...]
    dtype: str
    baseline: str
    repeats: int
    warmup: int
    check: bool
    seed: int
    timeout_s: float

    @classmethod
    def parse(cls, args: argparse.Namespace) -> Request:
        """Read the values of the options.

        Raises
        ------
        ValueError
            A value is not one that its option takes; names option, value and what it takes.
        """
        if args.baseline not in BASELINES:
            raise ValueError(f"--baseline {args.baseline}: choose one of {', '.join(BASELINES)}")
        if args.dtype not in DTYPES:
            raise ValueError(f"--dtype {args.dtype}: choose one of {', '.join(DTYPES)}")
        options = dict(map(assignment, args.option))
        return cls(
            args.algorithm,
            _algorithm(args.algorithm, options),
            options,
            counts(args.count),
            args.dtype,
            args.baseline,
            _integer("--repeats", args.repeats, 1),
            _integer("--warmup", args.warmup, 0),
            args.check,
            _integer("--seed", args.seed, 0),
            _seconds("--timeout", args.timeout),
        )


def _algorithm(name: str, options: dict[str, Any]) -> Algorithm | None:
    if name == ALLREDUCE:
        if options:
            raise ValueError(f"--algorithm {ALLREDUCE} has no options, not {', '.join(options)}")
        return None
    if name not in ALGORITHMS:
        raise ValueError(f"--algorithm {name}: choose one of {', '.join((*ALGORITHMS, ALLREDUCE))}")
    try:
        return mpicomp.algorithm(name, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--algorithm {name} cannot be made with these options: {error}") from error


def counts(text: str) -> tuple[int, ...]:
    """Elements from ``"25e6"``, ``"1e3,1e6"`` or ``"min:max:factor"``; the factor is 2 where it is left out.

    Raises
    ------
    ValueError
        The text is none of these.
    """
    found: list[int] = []
    for part in text.split(","):
        bounds = part.split(":")
        if len(bounds) > 3:
            raise ValueError(f"--count {part}: a range is min:max or min:max:factor")
        low = high = _elements(bounds[0])
        if len(bounds) > 1:
            high = _elements(bounds[1])
        factor = _number(bounds[2], part) if len(bounds) > 2 else 2.0
        if factor <= 1 or high < low:
            raise ValueError(f"--count {part}: in min:max:factor, max is at least min and the factor above 1")
        size = float(low)
        while size <= high and len(found) <= MOST_COUNTS:
            if not found or found[-1] != round(size):
                found.append(round(size))
            size *= factor
    if len(found) > MOST_COUNTS:
        raise ValueError(f"--count {text}: these are more than {MOST_COUNTS} sizes; take a larger factor")
    return tuple(found)


def _elements(text: str) -> int:
    value = _number(text, text)
    if value < 1 or value != int(value):
        raise ValueError(f"--count {text}: give whole numbers of elements from 1 up, such as 1000 or 25e6")
    return int(value)


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"--count {whole}: {text!r} is not a number; write 1000, 25e6, 1e3,1e6 or 1e3:1e6:10")
    return value


def _integer(option: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"{option} {text}: give a whole number of at least {least}")
    return value


def _seconds(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ValueError(f"{option} {text}: give a positive number of seconds")
    return value
