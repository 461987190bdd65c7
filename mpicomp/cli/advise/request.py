"""What ``mpicomp advise`` is asked, read from its arguments."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from collectives.cost.link import LinkModel
from collectives.execution.workers import MOST_THREADS
from mpicomp.algorithms import ALGORITHMS, Algorithm, Marsit, algorithm
from mpicomp.cli.advise.learning import LEARNING, Grade
from mpicomp.cli.arguments import DTYPES, choice, count, integer, number, seconds

# CascadingSSDM is there to show that it fails, TrueTopK to study others by: it sends more than a dense sum.
_LEFT_OUT = ("cascading-ssdm", "true-top-k")
METHODS: Mapping[str, Algorithm] = {
    "dense": algorithm("dense"),
    "marsit-100": Marsit(full_precision_every=100),
    "marsit": Marsit(full_precision_every=None),
    "marsit-1-winner": Marsit(full_precision_every=None, winners=1),
    "marsit-2-winners": Marsit(full_precision_every=None, winners=2),
    **{name: algorithm(name) for name in ALGORITHMS if name not in ("dense", "marsit", *_LEFT_OUT)},
}
COMPARED = frozenset(name for name, learned in LEARNING.items() if learned.grade is Grade.COMPARED)
"""Predicted to compare others with; advised only where nothing else was asked for."""


@dataclass(frozen=True)
class Request:
    """Parsed arguments."""

    count: int  # elements
    dtype: str
    compute_s: float  # of a step
    methods: tuple[str, ...]  # of METHODS, dense among them
    network: LinkModel | None  # None: to be measured
    ranks: int | None  # None: this job's
    threads: int  # of each rank
    timeout_s: float

    @classmethod
    def parse(cls, args: argparse.Namespace) -> Request:
        """Read the values of the options; ValueError names one that cannot be used, its value and what it takes."""
        if (args.count is None) == (args.model is None):
            raise ValueError("say how long the gradient is: either --count 25e6 or --model module:name")
        return cls(
            dtype=choice("--dtype", args.dtype, DTYPES),
            compute_s=number("--compute-ms", args.compute_ms, 0.0) / 1e3,
            methods=tuple(METHODS) if args.methods is None else _chosen(args.methods),
            network=_network(args.network),
            ranks=None if args.ranks is None else integer("--ranks", args.ranks, 2),
            threads=integer("--threads", args.threads, 1, MOST_THREADS),
            timeout_s=seconds("--timeout", args.timeout),
            count=_parameters(args.model) if args.count is None else count(args.count),  # may take long
        )


def _chosen(text: str) -> tuple[str, ...]:
    """The methods of ``"marsit,scalecom"``, in the order of `METHODS`; dense is always one of them."""
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in METHODS), None)
    if unknown is not None:
        raise ValueError(f"--methods {text}: there is no {unknown!r}: choose from {', '.join(METHODS)}")
    if set(names) == {"dense"}:
        raise ValueError(f"--methods {text}: name one or more to compare with dense")
    return tuple(name for name in METHODS if name == "dense" or name in names)


def _network(path: str | None) -> LinkModel | None:
    if path is None:
        return None
    try:
        return LinkModel.load(path)
    except OSError as error:
        raise ValueError(f"--network {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--network {error}") from error


def _parameters(text: str) -> int:
    """Trainable parameters of the model that ``"module:name"`` makes when it is called without arguments."""
    module, colon, name = text.partition(":")
    cure = "write it as package.module:callable, importable from here, such as torchvision.models:resnet50"
    if not colon:
        raise ValueError(f"--model {text}: {cure}")
    try:
        model = getattr(importlib.import_module(module), name)()
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    except Exception as error:
        raise ValueError(f"--model {text}: {type(error).__name__}: {error}; {cure}") from error
    if not count:
        raise ValueError(f"--model {text} has no trainable parameters")
    return int(count)
