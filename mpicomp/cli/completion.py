"""``mpicomp completion bash`` prints a script with which the shell completes commands, options and their values.

The tab key starts no Python: the script is made once, by shtab, which the extra ``completion`` installs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

from collectives.schedules.registry import TOPOLOGIES
from mpicomp.cli.main import COMMANDS, make_parser

SHELLS = ("bash", "zsh", "fish")
INSTALLING: Mapping[str, str] = {
    "bash": "mpicomp completion bash > ~/.local/share/bash-completion/completions/mpicomp",
    "zsh": "mpicomp completion zsh > FOLDER/_mpicomp, with a FOLDER of $fpath",
    "fish": "mpicomp completion fish > ~/.config/fish/completions/mpicomp.fish",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``mpicomp completion``."""
    parser.epilog = "; ".join(INSTALLING.values())
    parser.add_argument("shell", choices=SHELLS, help="shell to print the script for")


def run(args: argparse.Namespace) -> int:
    """Print the script and return the exit status."""
    try:
        import shtab
    except ImportError as error:
        print(f"mpicomp completion: error: {error}: pip install shtab", file=sys.stderr)
        return 1
    parser, _ = make_parser(COMMANDS, lenient=True)
    for action in _actions(parser):
        kind = {"FILE": shtab.FILE, "PROGRAM": shtab.FILE, "FOLDER": shtab.DIRECTORY}.get(str(action.metavar))
        if kind is not None:
            action.complete = kind  # type: ignore[attr-defined]
        choices = _values().get(action.dest)
        if choices and action.option_strings:
            action.choices = choices
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:  # argparse has no public list of them
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _actions(part)


def _values() -> dict[str, Sequence[str]]:
    """Return the values of options whose texts are checked after parsing, by destination."""
    from mpicomp.algorithms import ALGORITHMS  # loads MPI
    from mpicomp.cli.arguments import DTYPES

    return {"algorithm": sorted(ALGORITHMS), "topology": ["auto", "mpi", *TOPOLOGIES], "dtype": DTYPES}
