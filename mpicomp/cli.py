"""The command ``mpicomp``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each module has add_arguments(parser) and run(args) -> exit status.
COMMANDS = {
    "doctor": ("mpicomp.doctor", "find out whether a job can run here, and what would slow it down"),
    "bench": ("mpicomp.bench", "time an all-reduce against MPI's own"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Parameters
    ----------
    argv
        The arguments after the program's name; None takes them from the command line.

    Returns
    -------
    int
        The exit status.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="mpicomp", description="Gradient all-reduce with few bits over plain MPI.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # Only the chosen command is imported: the doctor must work where the others cannot even be loaded.
        if name in arguments[:1]:
            command = importlib.import_module(module)
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    args = parser.parse_args(arguments)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
