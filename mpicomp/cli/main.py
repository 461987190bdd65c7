"""The command ``mpicomp``."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Collection, Sequence

from mpicomp import __version__
from mpicomp.cli.outcome import open_closed_outputs, run_command

# Each module has add_arguments(parser) and run(args) -> exit status.
COMMANDS = {
    "demo": ("mpicomp.cli.demo", "train a small model over slow links, dense and with Marsit, and show the difference"),
    "run": ("mpicomp.cli.run.start", "start a program on several ranks, with the settings that it needs"),
    "doctor": ("mpicomp.cli.doctor", "check whether a job can run here, and name the settings that would slow it down"),
    "warm": ("mpicomp.cli.warm", "compile all kernels once for this machine, so that no job has to"),
    "bench": ("mpicomp.cli.bench", "time an all-reduce against MPI's own"),
    "report": ("mpicomp.cli.cluster_report", "check a report of mpicomp bench --report before it is sent to others"),
    "advise": ("mpicomp.cli.advise", "predict the time of a training step with each method on this network"),
    "trace": ("mpicomp.cli.trace", "join the ranks' traces into one file, and print where their time went"),
    "analyze": ("mpicomp.cli.analyze", "name the ranks that others waited for, from the files of a job that hung"),
    "help": ("mpicomp.cli.help", "print a page of the manual, or the list of pages"),
    "completion": ("mpicomp.cli.completion", "print a script with which bash, zsh or fish completes this command"),
}


EXAMPLES = """\
for example:
  mpicomp demo                   the gain on slow links, in a minute
  mpicomp run -n 4 train.py      your program on four ranks
  mpicomp bench --help           options of a command
  mpicomp help quickstart        a page of the manual"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; `argv` is for tests, the command line by default."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    open_closed_outputs()
    return run_command(" ".join(arguments[:1]), lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # an output of ASCII must not end a report
        sys.stdout.reconfigure(errors="replace")
    if not os.environ.get("HOME") and arguments[:1] != ["doctor"]:  # which reports it; Open MPI does not start then
        os.environ["HOME"] = tempfile.gettempdir()
    if arguments[:1] == ["bench"] and any(one.startswith("--repo") for one in arguments):
        # Open MPI reads this when it is initialised: the report compares with each of its algorithms.
        os.environ.setdefault("OMPI_MCA_coll_tuned_use_dynamic_rules", "1")
    parser, options = make_parser(arguments[:1])
    if not arguments:
        print(f"{parser.format_usage()}\n{EXAMPLES}")
        return 2
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        found = _suggestion(arguments[0], [*COMMANDS, "train"])
        if "'train'" in found:
            found = " (to train, start your own script: mpicomp run -n 4 train.py)"
        parser.error(f"there is no command {arguments[0]!r}{found}: choose one of {', '.join(COMMANDS)}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_suggestion(name, options)}")
    return int(args.run(args))


def make_parser(chosen: Collection[str], lenient: bool = False) -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return a parser that knows the options of the chosen commands, and their names."""
    parser = argparse.ArgumentParser(prog="mpicomp", description="Gradient all-reduce with few bits over plain MPI.")
    parser.add_argument("--version", action="version", version=f"mpicomp {__version__}")
    options: list[str] = []
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        # only the chosen ones are imported: the doctor must work where imports of the others fail
        if name not in chosen:
            continue
        try:
            command = importlib.import_module(module)
        except (ImportError, RuntimeError) as error:
            # the options are left out; otherwise this ends the program
            if lenient:
                continue
            problem = importlib.import_module("collectives.missing_mpi").mpi_problem(error)
            if not problem:
                raise
            parser.exit(1, f"mpicomp {name}: error: {problem}\n")
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
        options += subparser._option_string_actions  # argparse has no public list of them
    return parser, options


def _suggestion(name: str, names: Collection[str]) -> str:
    from collectives.quoting import suggestion  # the doctor must work where `collectives` is another package

    return suggestion(name, names)


if __name__ == "__main__":
    sys.exit(main())
