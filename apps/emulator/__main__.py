"""``python -m apps.emulator --nodes 4 --rate 1gbit -- mpicomp bench``: an MPI job on emulated hosts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from apps.emulator.link_speed import measure
from apps.emulator.mpirun import mpirun, require_mpirun
from apps.emulator.network import ClusterError, Layout, Network
from apps.launch import exit_on_signals, run
from collectives.cost.rate import Rate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the job's exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error("what is to run? put it behind --, as in: -- mpicomp bench --count 1e6")
    try:
        layout = _layout(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        require_mpirun(options.mpi)
        if os.geteuid():
            become_root_of_a_namespace(sys.argv[1:] if argv is None else argv)
        exit_on_signals()
        with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as folder, Network(layout) as network:
            if not options.no_check:
                for link in measure(network):
                    print(link, file=sys.stderr, flush=True)
            command, env = mpirun(network, Path(folder), options.mpi, options.ranks_per_node, options.command)
            return run(network.nodes[0].command(command), env, capture=False)[0]
    except (ClusterError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def become_root_of_a_namespace(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by one that is root in namespaces of its own; ClusterError if the kernel refuses."""
    namespaces = ["unshare", "-Urnm"]  # of users, whose root this process becomes, of networks, and of mounts
    try:
        tried = subprocess.run([*namespaces, "true"], capture_output=True, text=True, check=False)
        problem = tried.stderr.strip() if tried.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        raise ClusterError(f"emulated hosts need root, and this kernel gives users no namespaces ({problem}): use sudo")
    print("without root: the hosts are in a user namespace", file=sys.stderr, flush=True)
    # named network namespaces are kept in /run, which belongs to the real root
    script = 'mount -t tmpfs none /run && exec "$@"'
    program = [sys.executable, "-m", "apps.emulator", *arguments]
    os.execvp("unshare", [*namespaces, "sh", "-c", script, "sh", *program])


def _layout(options: argparse.Namespace) -> Layout:
    rates = [Rate.parse(text) for text in options.rate.split(",")]
    if len(rates) not in (1, options.nodes):
        raise ValueError(f"{len(rates)} rates for {options.nodes} nodes: give one for all, or one for each")
    return Layout(
        tuple(rates * options.nodes if len(rates) == 1 else rates),
        options.groups,
        Rate.parse(options.between),
        options.delay_ms,
        options.loss_percent,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.emulator",
        description="Run an MPI job on hosts that this machine emulates, with links of a chosen speed. Needs root, or "
        "a kernel that gives users namespaces.",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_argument("--nodes", type=int, default=4, help="hosts (default %(default)s)")
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="of each node's egress, or one for each, with commas; none: no limit (%(default)s)",
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--groups", type=int, default=1, help="of neighbouring nodes, with fast links within")
    parser.add_argument("--between", default="none", metavar="RATE", help="from one group to the others (no limit)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added to each packet; needs netem")
    parser.add_argument("--loss-percent", type=float, default=0.0, help="of packets; needs netem")
    parser.add_argument(
        "--mpi", choices=("openmpi", "mpich"), default="openmpi", help="whose mpirun it is (%(default)s)"
    )
    parser.add_argument("--no-check", action="store_true", help="do not measure the links first")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
