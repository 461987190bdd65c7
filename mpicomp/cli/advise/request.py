"""Values of the options of ``mpicomp advise``."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

from collectives.cost.link import LinkModel
from collectives.execution.workers import MOST_THREADS
from mpicomp.cli.advise.report import METHODS, QUICK
from mpicomp.cli.arguments import DTYPES, choice, count, integer, number, seconds


@dataclass(frozen=True)
class AdviseRequest:
    """Parsed arguments."""

    count: int  # elements
    dtype: str
    compute_s: float  # of a step
    methods: tuple[str, ...]  # of METHODS, dense among them
    network: LinkModel | None  # None: to be measured
    ranks: int | None  # None: this job's
    threads: int  # of each rank
    timeout_s: float
    ranks_per_node: int | None = None  # None: all of a host
    quick: bool = False  # fewer and shorter calls, within a minute

    @classmethod
    def parse(cls, args: argparse.Namespace) -> AdviseRequest:
        """Read the values of the options. Raises ValueError with the option, its value and the values it accepts."""
        if (args.count is None) == (args.model is None):
            raise ValueError("give the length of the gradient: either --count 25e6 or --model module:name")
        return cls(
            dtype=choice("--dtype", args.dtype, DTYPES),
            compute_s=number("--compute-ms", args.compute_ms, 0.0) / 1e3,
            methods=(QUICK if args.quick else tuple(METHODS)) if args.methods is None else _parse_methods(args.methods),
            network=_network(args.network),
            ranks=None if args.ranks is None else integer("--ranks", args.ranks, 2),
            threads=integer("--threads", args.threads, 1, MOST_THREADS),
            timeout_s=seconds("--timeout", args.timeout),
            ranks_per_node=None if args.ranks_per_node is None else integer("--ranks-per-node", args.ranks_per_node, 1),
            quick=args.quick,
            count=_parameters(args.model) if args.count is None else count(args.count),  # may take long
        )


def _parse_methods(text: str) -> tuple[str, ...]:
    """Return the methods of ``"marsit,scalecom"`` and dense, in the order of `METHODS`."""
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
    """Return the number of trainable parameters of the model that the callable ``"module:name"`` makes."""
    module, colon, name = text.partition(":")
    cure = "write it as package.module:callable, importable from here, such as torchvision.models:resnet50"
    if not colon:
        raise ValueError(f"--model {text}: {cure}")
    try:
        # python -m has this folder on its path, an installed command only that of its own file
        sys.path.insert(0, str(Path.cwd()))
        model = getattr(importlib.import_module(module), name)()
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    except (Exception, SystemExit) as error:  # a script without a guard ends the process where it is imported
        problem = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise ValueError(f"--model {text}: {problem}; {cure}") from error
    if not count:
        raise ValueError(f"--model {text} has no trainable parameters")
    return int(count)
