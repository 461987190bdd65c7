"""What ``mpicomp advise`` is asked, read from its arguments."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass

from collectives.cost.link import LinkModel
from mpicomp.cli.advise.methods import METHODS, chosen
from mpicomp.cli.arguments import DTYPES, choice, count, integer, number, seconds


@dataclass(frozen=True)
class Request:
    """Parsed arguments.

    Attributes
    ----------
    count : int
        Elements.
    dtype : str
    compute_s : float
        Of a step.
    methods : tuple of str
        Of `METHODS`, dense among them.
    network : LinkModel or None
        None: to be measured.
    ranks : int or None
        None: this job's.
    timeout_s : float
    """

    count: int
    dtype: str
    compute_s: float
    methods: tuple[str, ...]
    network: LinkModel | None
    ranks: int | None
    timeout_s: float

    @classmethod
    def parse(cls, args: argparse.Namespace) -> Request:
        """Read the values of the options.

        Raises
        ------
        ValueError
            A value is not one that its option takes; names option, value and what it takes.
        """
        if (args.count is None) == (args.model is None):
            raise ValueError("say how long the gradient is: either --count 25e6 or --model module:name")
        return cls(
            dtype=choice("--dtype", args.dtype, DTYPES),
            compute_s=number("--compute-ms", args.compute_ms, 0.0) / 1e3,
            methods=tuple(METHODS) if args.methods is None else chosen(args.methods),
            network=_network(args.network),
            ranks=None if args.ranks is None else integer("--ranks", args.ranks, 2),
            timeout_s=seconds("--timeout", args.timeout),
            count=parameters(args.model) if args.count is None else count(args.count),  # may take long
        )


def _network(path: str | None) -> LinkModel | None:
    if path is None:
        return None
    try:
        return LinkModel.load(path)
    except OSError as error:
        raise ValueError(f"--network {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--network {error}") from error


def parameters(text: str) -> int:
    """Trainable parameters of the model that ``"module:name"`` makes when it is called without arguments.

    Raises
    ------
    ValueError
        There is no such module or name, calling it fails, or it makes no model with parameters.
    """
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
