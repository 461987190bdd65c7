"""Options of runs of split learning, and their command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apps.pipeline.program import add_counts, fields_of
from apps.train.data import DATASETS
from mpicomp.codecs.rows import RowQuantizer, TopRows
from mpicomp.pipeline import Deltas, Direct
from mpicomp.pipeline.activations import Compression

Method = Literal["fp32", "directq", "aq-sgd"]
METHODS: tuple[Method, ...] = ("fp32", "directq", "aq-sgd")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run; the defaults of training are the paper's."""

    method: Method = "aq-sgd"
    # bits and the part of gradients that is sent count for methods but fp32
    forward_bits: int = 2
    backward_bits: int = 8
    kept: float = 0.2
    clients: int = 16
    concentration: float = 0.5
    rounds: int = 40
    local_epochs: int = 3
    batch: int = 64
    lr: float = 0.01
    momentum: float = 0.9
    decay_every: int = 20
    flip: bool = False
    examples: int = 2048
    test_examples: int = 1000
    dataset: str | None = None  # None: Fashion-MNIST if Debian's package is there, else the digits of scikit-learn
    data: str | None = None  # folder of IDX files
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the method, as in the paper."""
        if self.method == "fp32":
            return "fp32"
        method = {"directq": "DirectQ", "aq-sgd": "AQ-SGD"}[self.method]
        kept = "" if self.kept == 1 else f"[{self.kept:g}]"
        return f"{method} fw{self.forward_bits} bw{self.backward_bits}{kept}"

    def forward(self, examples: int) -> Compression:
        """Return the compression of activations, where a client has so many examples."""
        if self.method == "fp32":
            return Direct()
        codec = RowQuantizer(self.forward_bits)
        return Direct(codec) if self.method == "directq" else Deltas(codec, examples)

    def backward(self) -> Compression:
        """Return the compression of gradients: means over a batch are small, so that scales need float32."""
        if self.method == "fp32":
            return Direct()
        codec = RowQuantizer(self.backward_bits, scale="float32")
        return Direct(codec if self.kept == 1 else TopRows(self.kept, codec))

    def rate(self, number: int) -> float:
        """The learning rate of a round, from 0 on."""
        return float(self.lr * 0.1 ** (number // self.decay_every))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line; `runs` of the result has those of a run for each method."""
    parser = _parser()
    found = parser.parse_args(argv)
    given = fields_of(Options, found)
    if not 0 < found.kept <= 1:
        parser.error(f"--kept {found.kept} is no part: give a number above 0 and at most 1")
    for name in ("concentration", "lr"):
        if not getattr(found, name) > 0:
            parser.error(f"--{name} {getattr(found, name)} is not positive")
    if found.data is not None and found.dataset is None:
        parser.error("--data DIR needs --dataset idx or fashion-mnist")
    found.runs = [Options(method=method, **given) for method in dict.fromkeys(found.methods)]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.pipeline.split",
        description="Split learning on images: rank 0 is the server, and the clients are spread over the other ranks.",
        epilog="mpirun -n 3 python -m apps.pipeline.split --rounds 40 --json split.json --plot split.png",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Options()
    add = parser.add_argument_group("what travels").add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="runs, one after the other")
    add("--forward-bits", type=int, choices=range(1, 9), default=default.forward_bits, help="bits of activations")
    add("--backward-bits", type=int, choices=range(1, 9), default=default.backward_bits, help="bits of gradients")
    add("--kept", type=float, default=default.kept, help="part of the gradients that is sent: the largest")
    add = parser.add_argument_group("clients and training").add_argument
    add_counts(
        add,
        default,
        (
            ("--clients", "which take turns"),
            ("--rounds", "in each of which every client has a turn"),
            ("--local-epochs", "of a client in its turn"),
            ("--batch", "examples of a step"),
            ("--decay-every", "rounds until the learning rate falls to a tenth"),
            ("--examples", "of the training images that are used"),
            ("--test-examples", "of the test images that are used"),
        ),
    )
    concentration = "of the Dirichlet distribution of labels over clients: the less, the more they are skewed"
    add("--concentration", type=float, default=default.concentration, help=concentration)
    add("--lr", type=float, default=default.lr, help="learning rate of SGD")
    add("--momentum", type=float, default=default.momentum, help="of SGD; a client begins its turn without")
    add("--flip", action="store_true", help="mirror half of the images, anew in each epoch")
    add("--dataset", choices=DATASETS, help="without it, fashion-mnist if Debian's package is there, else digits")
    add("--data", metavar="DIR", help="folder of the IDX files of --dataset")
    add("--seed", type=int, default=default.seed, help="of weights, clients' examples and their order")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="file for the records")
    add("--plot", type=Path, metavar="FILE", help="file for a plot of loss and accuracy")
    return parser
