"""The command line of ``apps.train``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apps.train.data import DATASETS
from apps.train.learning_rate import DECAYS
from apps.train.models import MODELS
from mpicomp.algorithms.per_node import LOCALS
from mpicomp.cli.arguments import assignment

ONE_BIT_ADAM = "one-bit-adam"
"""The --method that is an optimizer of its own."""
DEFAULT_LR = {"sgd": 0.1, "momentum": 0.03, "adam": 0.001}

NODES = "nodes"
"""Option that a run between nodes has besides those of the command line: the ranks of each node."""
_LARGEST_SEED = 10**12  # the generators take 64 bits, of which each rank uses a part for its number
_FREE = frozenset(
    {"epochs", "checkpoint", "checkpoint_every", "resume", "json", "timeout", "arrival_timeout", "data"}
    | {"threads", "trace", "link", "ranks_per_node", "on_failure", "keep_batch", "spares"}
)
"""Options that a resumed run may change, as they do not enter the arithmetic, or only with the nodes of `identity`."""
_PER_RANKS = frozenset({"batch", "lr", "topology", "network", NODES})
"""Options that it may change where the number of ranks changes, or their nodes."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and complete the options; a usage error ends the process, as argparse does."""
    parser = _parser()
    options = parser.parse_args(argv)
    options.algorithm_options = dict(options.option)
    if options.full_precision_every is not None:
        options.algorithm_options["full_precision_every"] = options.full_precision_every or None
    if options.residual is not None:
        options.algorithm_options["residual"] = options.residual
    one_bit_adam = options.algorithm == ONE_BIT_ADAM
    if options.optimizer is None:
        options.optimizer = "adam" if one_bit_adam else "momentum"
    if one_bit_adam and (options.optimizer, options.synchronize, options.local_steps) != ("adam", None, 1):
        parser.error(f"--method {ONE_BIT_ADAM} is an optimizer: leave out --optimizer, --synchronize, --local-steps")
    if options.lr is None:
        options.lr = DEFAULT_LR[options.optimizer]
    if options.decay == "step" and not options.decay_epochs:
        parser.error("--decay step needs --decay-epochs")
    for option in ("spares", "keep_batch"):
        if getattr(options, option) and options.on_failure != "regroup":
            parser.error(f"--{option.replace('_', '-')} needs --on-failure regroup")
    if options.spares and options.per_node is not None:
        parser.error("--per-node takes no newcomers: leave out --spares")
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR")
    return options


def differing(before: dict[str, Any], now: dict[str, Any], other_ranks: bool) -> list[str]:
    """The options by which a run cannot continue another, which may have been on other ranks or nodes."""
    free = _PER_RANKS if other_ranks else frozenset()
    return sorted(key for key in (now.keys() | before.keys()) - free if now.get(key) != before.get(key))


def identity(options: argparse.Namespace, nodes: Sequence[int] = ()) -> dict[str, Any]:
    """Return the options by which runs differ, for `differing`; can be written as JSON.

    `nodes` are the ranks of each node, which own parts of vectors.
    """
    own = {key: value for key, value in vars(options).items() if key not in _FREE and key != "option"}
    if options.decay == "cosine":
        own["epochs"] = options.epochs
    if options.per_node is not None:
        own[NODES] = list(nodes)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except those that the text has already and those that are empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or isinstance(action.default, list | tuple):
            return action.help
        return super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.train",
        description="Train an image classifier on all ranks of an MPI job, with a method of mpicomp.",
        epilog="mpirun -n 4 python -m apps.train --method marsit --topology ring --epochs 5 --json run.json",
        formatter_class=_Help,
    )
    add = parser.add_argument_group("data and model").add_argument
    add("--dataset", choices=DATASETS, default="digits", help="images; idx needs --data")
    add("--data", type=Path, metavar="DIR", help="folder of the IDX files, plain or .gz")
    add("--model", choices=tuple(MODELS), default="mlp", help="network that is trained")
    add("--hidden", type=_integers, metavar="N,N", help="units of each fully connected layer but the last")
    add("--width", type=positive, metavar="N", help="channels of the first convolution")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=positive, default=5, help="passes over the training images")
    add("--batch", type=positive, default=16, help="images per rank and step")
    optimizers = f"optimizer of each rank (default: momentum; with {ONE_BIT_ADAM} adam)"
    add("--optimizer", choices=tuple(DEFAULT_LR), help=optimizers)
    add("--lr", type=_positive_float, help="learning rate; each optimizer has a default")
    add("--momentum", type=float, default=0.9, help="factor of --optimizer momentum")
    add("--weight-decay", type=float, default=0.0, help="factor of the L2 penalty")
    add("--warmup-epochs", type=float, default=0.0, help="length of the linear warm-up")
    add("--decay", choices=DECAYS, default="none", help="how the learning rate falls")
    add("--decay-epochs", type=_integers, default=(), metavar="N,N", help="epochs at which --decay step acts")
    add("--decay-factor", type=_positive_float, default=0.1, help="factor of --decay step")
    add("--seed", type=_seed, default=0, help="seed of the weights and of the order of images")
    add = parser.add_argument_group("communication").add_argument
    add(
        *("--method", "--algorithm"),
        dest="algorithm",
        metavar="NAME",
        default="relay",
        help=f"name of the method, or {ONE_BIT_ADAM}",
    )
    add(
        "--full-precision-every",
        type=_period,
        metavar="K",
        help="a full-precision round every K rounds; none: no such rounds; each method has a default",
    )
    add("--residual", choices=("own", "paper"), help="residual rule of Marsit")
    add("--option", type=_assignment, action="append", default=[], metavar="KEY=VALUE", help="an option of the method")
    add("--synchronize", choices=("gradients", "updates"), help="what the ranks average; each method has a default")
    add("--local-steps", type=positive, default=1, help="optimizer steps per synchronization")
    add("--bucket-mb", type=_positive_float, default=25.0, help="size of the largest bucket in MiB")
    add(
        "--per-node",
        nargs="?",
        const="auto",
        choices=LOCALS,
        help="full precision within a node and the method between nodes; the value is the way of the sums within",
    )
    add("--ranks-per-node", type=positive, metavar="L", help="ranks of a host that count as a node (default: all)")
    add("--topology", default="auto", help="name of the schedule of the all-reduce")
    add("--network", metavar="FILE", help="measured network for --topology auto, from mpicomp advise --save")
    add(
        "--link",
        metavar="RATE[,LATENCY]",
        help="emulate slow links: hold messages back until a link of this rate, such as 100mbit or 1gbit,50us, would "
        "deliver them",
    )
    add("--timeout", type=_positive_float, default=60.0, help="seconds to wait for a silent rank")
    add("--arrival-timeout", type=_positive_float, default=300.0, help="seconds that a rank may come late to a call")
    add(
        "--on-failure",
        choices=("raise", "regroup"),
        default="raise",
        help="after the death of a rank: end with an error, or go on with the others, under `mpirun --with-ft ulfm`",
    )
    keep = "let the survivors of a death train on all images of a step, in several passes; needs --on-failure regroup"
    add("--keep-batch", action="store_true", help=keep)
    add("--spares", type=_count, default=0, help="last ranks of the job that wait, and take the places of dead ones")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where models and data lie; GPUs are dealt in turn")
    add("--threads", type=positive, default=1, help="threads of each rank that encode and decode pieces")
    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="file for a JSON line per epoch and one at the end")
    add("--trace", type=Path, metavar="DIR", help="folder for a trace of the calls of each rank")
    add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints, which all ranks must see")
    add(
        "--checkpoint-every",
        type=_interval,
        default=(1, "epochs"),
        metavar="N",
        help="epochs between checkpoints (default: 1), or steps, as in 500steps",
    )
    add("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of an argument."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _seed(text: str) -> int:
    value = int(text)
    if abs(value) > _LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text} is beyond {_LARGEST_SEED}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _integers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _period(text: str) -> int:
    return 0 if text.lower() == "none" else positive(text)


def _interval(text: str) -> tuple[int, str]:
    match = re.fullmatch(r"(\d+)(epochs|steps|)", text)
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of epochs nor like 500steps")
    return int(match[1]), match[2] or "epochs"


def _assignment(text: str) -> tuple[str, Any]:
    try:
        return assignment(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
