"""The command ``mpicomp``."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Collection, Sequence
from typing import Any

from mpicomp import __version__

# Each module has add_arguments(parser) and run(args) -> exit status.
COMMANDS = {
    "doctor": ("mpicomp.cli.doctor", "find out whether a job can run here, and what would slow it down"),
    "warm": ("mpicomp.cli.warm", "compile all kernels once for this machine, so that no job has to"),
    "bench": ("mpicomp.cli.bench", "time an all-reduce against MPI's own"),
    "advise": ("mpicomp.cli.advise", "predict what each method would make of a training step on this network"),
    "trace": ("mpicomp.cli.trace", "join the ranks' traces into one, and tell what their time was spent on"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand with the arguments after the program's name, or the command line's; the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="mpicomp", description="Gradient all-reduce with few bits over plain MPI.")
    parser.add_argument("--version", action="version", version=f"mpicomp {__version__}")
    options: Collection[str] = ()
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # Only the chosen command is imported: the doctor must work where the others cannot even be loaded.
        if name in arguments[:1]:
            try:
                command = importlib.import_module(module)
            except (ImportError, RuntimeError) as error:
                problem = importlib.import_module("collectives.mpi_library").cause(error)
                if not problem:
                    raise
                parser.exit(1, f"mpicomp {name}: error: {problem}\n")
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
            options = subparser._option_string_actions  # argparse has no public list of them
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        found = _suggestion(arguments[0], COMMANDS)
        parser.error(f"there is no command {arguments[0]!r}{found}: choose one of {', '.join(COMMANDS)}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_suggestion(name, options)}")
    return int(args.run(args))


def _suggestion(name: str, names: Collection[str]) -> str:
    from collectives.quoting import suggestion  # the doctor must work where this package is another one

    return suggestion(name, names)


def assignment(text: str) -> tuple[str, Any]:
    """One option of a method: ``"clip=inf"`` gives ``("clip", inf)``; words stay text, dashes in keys may be used.

    ValueError: there is no key.
    """
    key, equals, value = text.partition("=")
    key = key.replace("-", "_")
    if not equals or not key.isidentifier():
        raise ValueError(f"--option {text}: write it as key=value, such as full_precision_every=None")
    for read in (ast.literal_eval, float):
        try:
            found = read(value)
        except (ValueError, SyntaxError):
            continue
        if found is None or isinstance(found, bool | int | float):
            return key, found
    return key, value


if __name__ == "__main__":
    sys.exit(main())
