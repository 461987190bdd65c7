"""Options of a run, and their command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from apps.pipeline.model import Shape
from apps.pipeline.program import add_counts, fields_of
from apps.train.options import positive
from mpicomp.codecs.rows import FullRows, RowQuantizer
from mpicomp.pipeline import SCHEDULES, Deltas, Direct
from mpicomp.pipeline.activations import Compression

FULL, HALF = 32, 16
"""Bits that stand for float32 and float16."""
BITS = (*range(1, 9), HALF, FULL)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run: the grid, the model, the training and the bits of its messages."""

    stages: int = 4
    replicas: int = 1
    # 32 bits are float32 and 16 are float16; with either activations always travel directly
    forward_bits: int = 3
    backward_bits: int = 6
    gradient_bits: int = FULL
    direct: bool = False  # quantize activations (DirectQ), not differences (AQ-SGD)
    rounding: Literal["nearest", "stochastic"] = "nearest"
    store: Literal["memory", "disk"] = "memory"
    stored_bits: int = FULL
    schedule: str = "1f1b"
    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    epochs: int = 10
    batch: int = 16  # sequences of a replica and step
    micro_batches: int = 4
    lr: float = 3e-3
    warm_up: float = 0.1
    characters: int = 200_000
    skip: int = 0
    text: str | None = None
    weights: str | None = None
    seed: int = 0
    magnitudes: bool = False

    @property
    def shape(self) -> Shape:
        """Shape of the model."""
        return Shape(self.layers, self.width, self.heads, self.context)

    @property
    def name(self) -> str:
        """Name of the method, as in the paper."""
        if self.forward_bits == FULL and self.backward_bits == FULL:
            return "fp32"
        direct = "DirectQ" if self.direct or self.forward_bits in (HALF, FULL) else "AQ-SGD"
        return f"{direct} fw{self.forward_bits} bw{self.backward_bits}"

    def forward(self, examples: int, folder: Path | None) -> Compression:
        """Return the compression of activations, of so many examples."""
        if self.direct or self.forward_bits in (HALF, FULL):
            return Direct(self._codec(self.forward_bits, "float16"))
        stored = None if self.stored_bits == FULL else self._codec(self.stored_bits, "float16")
        codec = RowQuantizer(self.forward_bits, self._rounding(self.forward_bits))
        run = repr(sorted(self.identity().items()))
        return Deltas(codec, examples, folder=folder if self.store == "disk" else None, run=run, stored=stored)

    def backward(self) -> Compression:
        """Return the compression of their gradients: means over a batch are small, so that scales need float32."""
        if self.backward_bits in (HALF, FULL):
            return Direct(self._codec(self.backward_bits, "float32"))
        return Direct(RowQuantizer(self.backward_bits, self._rounding(self.backward_bits), "float32"))

    def identity(self) -> dict[str, Any]:
        """Return the options that a checkpoint must share with the run that goes on from it."""
        return {key: value for key, value in asdict(self).items() if key != "magnitudes"}

    def _codec(self, bits: int, scale: Literal["float16", "float32"]) -> FullRows | RowQuantizer:
        if bits in (HALF, FULL):
            return FullRows("float32" if bits == FULL else "float16")
        return RowQuantizer(bits, "nearest", scale)

    def _rounding(self, bits: int) -> Literal["nearest", "stochastic"]:
        return "nearest" if bits == 1 else self.rounding


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line; `options` of the result are those of the run."""
    parser = _parser()
    found = parser.parse_args(argv)
    if found.batch % found.micro_batches:
        parser.error(f"--batch {found.batch} does not divide into --micro-batches {found.micro_batches}")
    if found.skip < 0:
        parser.error(f"--skip {found.skip} is below 0")
    if found.width % found.heads:
        parser.error(f"--width {found.width} does not divide into --heads {found.heads}")
    if found.stages > found.layers:
        parser.error(f"--stages {found.stages} need as many --layers, not {found.layers}")
    if found.resume and found.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR")
    if found.store == "disk" and found.checkpoint is None:
        parser.error("--store disk needs --checkpoint DIR: its files belong to the checkpoint")
    found.options = Options(**fields_of(Options, found))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.pipeline",
        description="Train a character model in pipeline stages, on stages x replicas ranks of an MPI job.",
        epilog="mpirun -n 4 python -m apps.pipeline --stages 4 --forward-bits 3 --backward-bits 6 --json run.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Options()
    add = parser.add_argument_group("ranks").add_argument
    add("--stages", type=positive, default=default.stages, metavar="K", help="slices that the model is cut into")
    add("--replicas", type=positive, default=default.replicas, metavar="M", help="pipelines side by side")
    add = parser.add_argument_group("what travels").add_argument
    told = "bits of {}: 1 to 8, 16 or 32"
    add("--forward-bits", type=int, choices=BITS, default=default.forward_bits, help=told.format("activations"))
    add("--backward-bits", type=int, choices=BITS, default=default.backward_bits, help=told.format("their gradients"))
    add(
        "--gradient-bits",
        type=int,
        choices=(*range(1, 9), FULL),
        default=default.gradient_bits,
        help="bits of the model's gradients between replicas, by OneBitAdam; 32: Adam, averaged while backward runs",
    )
    add("--direct", action="store_true", help="quantize activations, not their differences: DirectQ")
    add("--rounding", choices=("nearest", "stochastic"), default=default.rounding, help="of activations and gradients")
    add("--store", choices=("memory", "disk"), default=default.store, help="where the last messages are kept")
    add("--stored-bits", type=int, choices=BITS, default=default.stored_bits, help=told.format("messages kept"))
    add(
        "--link",
        metavar="RATE[,LATENCY]",
        help="emulate slow links: hold messages back until a link of this rate, such as 100mbit or 1gbit,50us, would "
        "deliver them",
    )
    add(
        "--ranks-per-node",
        type=positive,
        metavar="L",
        help="neighbouring ranks that share an emulated link, and send to each other past it (default: 1)",
    )
    add("--schedule", choices=tuple(SCHEDULES), default=default.schedule, help="order of micro-batches")
    add = parser.add_argument_group("model and training").add_argument
    add_counts(
        add,
        default,
        (
            ("--layers", "transformer blocks"),
            ("--width", "of a block"),
            ("--heads", "of attention"),
            ("--context", "characters that are read at once"),
            ("--epochs", "passes over the text"),
            ("--batch", "sequences of a replica and step"),
            ("--micro-batches", "that a batch is cut into"),
            ("--characters", "of the text that are used"),
        ),
    )
    add("--skip", type=int, default=default.skip, metavar="N", help="characters at the text's beginning to leave out")
    add("--text", metavar="FILE", help="a text to learn; without it, the source of Python's standard library")
    add("--weights", metavar="FILE", help="weights to begin with, that a run with --save has written")
    add("--lr", type=float, default=default.lr, help="largest learning rate of Adam")
    add("--warm-up", type=float, default=default.warm_up, help="part of the steps in which the learning rate rises")
    add("--seed", type=int, default=default.seed, help="of weights, order and stochastic rounding")
    add = parser.add_argument_group("output").add_argument
    add("--magnitudes", action="store_true", help="record the mean size of activations and of their changes")
    add("--json", type=Path, metavar="FILE", help="file for the record")
    add("--save", type=Path, metavar="FILE", help="file for the weights of the whole model")
    add("--plot", type=Path, metavar="FILE", help="file for a plot of the losses")
    add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints, one after each epoch")
    add("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    add("--stop-after", type=positive, metavar="N", help="end after epoch N of --epochs; --resume continues")
    return parser
