"""``mpicomp run`` starts a program on several ranks: it finds the launcher and sets the variables that a job needs.

Input, output, signals and the exit status are the launcher's. Errors of ranks are printed once, the cause last.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from collectives.launcher import launched_by
from collectives.quoting import suggestion
from mpicomp.cli.arguments import choice, integer
from mpicomp.cli.run.allocation import Allocation, Host, find_allocation, gpus, this_machine
from mpicomp.cli.run.environment import IS_THREADS, THREADS, choose, threads
from mpicomp.cli.run.launcher import Launcher, find, with_python
from mpicomp.cli.run.output import run_job

USAGE_ERROR = 2
FIRST_PORT = 29500  # torchrun's
JOB_NUMBERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
MOST_HOSTS_SHOWN = 8
MOST_RANKS = 1_000_000  # for more the launchers use up the memory
_EXAMPLE = "mpicomp run -n 4 train.py"
_HOST_OPTIONS = ("-H", "-host", "--host", "-hosts", "-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
_EPILOG = """\
The program is a script of Python, a command, or -m and a module. Options after it belong to it. Options of the launcher
come before it, between two --:

  mpicomp run -n 4 train.py --epochs 3
  mpicomp run -n 4 -m package.train --epochs 3
  mpicomp run -n 4 -- --map-by node -- train.py --epochs 3
  mpicomp run --gpus train.py
"""


TEMPLATES = {"slurm": "run.sbatch", "pbs": "run.pbs", "lsf": "run.lsf", "kubernetes": "mpijob.yaml"}


class Job(NamedTuple):
    """A program with its arguments, and the user's options for the launcher."""

    program: list[str]
    launcher_options: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, _EPILOG
    add = parser.add_argument
    add("-n", "--ranks", metavar="N", help="number of ranks; by default the slots of the allocation, or the cores")
    add("--gpus", action="store_true", help="start a rank for each GPU, with the variables that torchrun sets")
    add(
        "--launcher",
        metavar="COMMAND",
        default=os.environ.get("MPICOMP_LAUNCHER"),
        help="command that starts the ranks, such as 'srun --mpi=pmix'; by default MPICOMP_LAUNCHER, mpirun or srun",
    )
    add("--template", metavar="SYSTEM", help=f"print a job script and start nothing: {', '.join(TEMPLATES)}")
    add("--dry-run", action="store_true", help="print the command and its settings, and start nothing")
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as python -m")
    add("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="script or command, and its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program and return the launcher's exit status."""
    try:
        return _start(args)
    except ValueError as error:
        print(f"mpicomp run: error: {error}", file=sys.stderr)
        return USAGE_ERROR


def template(system: str) -> str:
    """Return the job script for a batch system; ValueError for a system without templates."""
    name = TEMPLATES[choice("--template", system, TEMPLATES)]
    here = Path(__file__)
    # the wheel has them in a folder of this package; an editable installation finds the project's own
    folders = here.with_name("templates"), *(here.parents[3] / folder for folder in ("batch", "slurm"))
    return next(folder / name for folder in folders if (folder / name).is_file()).read_text()


def _start(args: argparse.Namespace) -> int:
    if args.template is not None:
        if args.ranks is not None:
            cure = "leave out -n, and write the number there"
            raise ValueError(f"--template {args.template}: the script has its own number of ranks: {cure}")
        print(template(args.template), end="")
        return 0
    outer = launched_by(os.environ)
    if outer:
        raise ValueError(
            f"this is a rank of a job already ({outer} started it), and would start a job for each rank: leave out the "
            "outer launcher, or run the program without mpicomp run"
        )
    job = _job([*args.program] if args.module is None else ["-m", *args.module, *args.program])
    own_hosts = any(option.partition("=")[0] in _HOST_OPTIONS for option in job.launcher_options)
    found = find_allocation(os.environ)
    n_ranks = None if args.ranks is None else integer("-n", args.ranks, 1, MOST_RANKS)
    if own_hosts:
        if n_ranks is None:
            raise ValueError("give -n: how many ranks the hosts that the launcher's options name should get")
        found, one_machine = Allocation("hosts of the launcher's options", "", ()), False
    else:
        found, one_machine = found or this_machine(), found is None
        n_ranks = n_ranks or (_gpus_of(found, one_machine) if args.gpus else found.slots)
        _require_room(n_ranks, found, one_machine, job.launcher_options)
    placed = [(found.hosts[0], n_ranks)] if one_machine else found.place(n_ranks)
    n_threads = threads(os.environ, [(host.cores, ranks) for host, ranks in placed])
    launcher = find(os.environ, args.launcher)
    settings = choose(os.environ, n_threads, one_machine)
    environ = settings.apply(os.environ)
    environ["PATH"] = with_python(environ.get("PATH", os.defpath))
    meeting = _meeting_point(environ, placed, one_machine, own_hosts) if args.gpus else {}
    as_rank = [sys.executable, "-m", "mpicomp.cli.run.rank"] if args.gpus else []
    options = launcher.line(found, n_ranks, n_threads, one_machine, job.launcher_options, meeting)
    line = [*options, *as_rank, *job.program]
    if args.dry_run:
        unset = [word for name in settings.removed for word in ("-u", name)]
        added = (f"{name}={value}" for name, value in (settings.added | meeting).items())
        print(shlex.join(["env", *unset, *added, *line]))
        return 0
    print(_placement(launcher, found, n_ranks, environ[THREADS], one_machine), file=sys.stderr, flush=True)
    if args.gpus and one_machine and not gpus(os.environ):
        print("mpicomp run: --gpus: there is no GPU here, so the ranks share the CPU", file=sys.stderr, flush=True)
    print(_note_threads(os.environ, environ[THREADS], n_threads, placed), end="", file=sys.stderr, flush=True)
    return run_job(line, environ | meeting)


def _require_room(n_ranks: int, found: Allocation, one_machine: bool, options: list[str]) -> None:
    shares = any("oversubscribe" in option for option in options)
    if not one_machine and n_ranks > found.slots and not shares:
        hosts = f", {found.slots // len(found.hosts)} on each of {len(found.hosts)}" if len(found.hosts) > 1 else ""
        raise ValueError(
            f"-n {n_ranks}: {found.grantor} has {found.slots} slots{hosts}: {found.cure}, or take -n {found.slots}"
        )


# A rank for each GPU --------------------------------------------------------------------------------------------------


def _gpus_of(found: Allocation, one_machine: bool) -> int:
    """Return the number of GPUs of all hosts, of which each has as many slots."""
    here = gpus(os.environ)
    if not here:
        raise ValueError("--gpus: there is no GPU here; start it where the GPUs are, or give -n without it")
    if one_machine:
        return here
    odd = next((host for host in found.hosts if host.slots != here), None)
    if odd is not None:
        # resources of a PBS or an LSF have names of their own
        slurms = f", as in sbatch --ntasks-per-node={here} --gpus-per-node={here}"
        raise ValueError(
            f"--gpus: {found.grantor} has {odd.slots} slot{'s' * (odd.slots != 1)} on {odd.name}, and a node has "
            f"{here} GPU{'s' * (here != 1)}: ask for as many{slurms * ('Slurm' in found.grantor)}, or give -n"
        )
    return found.slots


def _meeting_point(
    environ: Mapping[str, str], placed: list[tuple[Host, int]], one_machine: bool, own_hosts: bool
) -> dict[str, str]:
    """Return the address and port at which the ranks of ``torch.distributed`` meet; those of the user win."""
    if one_machine:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address, port = "127.0.0.1", free.getsockname()[1]
    else:
        # jobs of a batch system that share a node have ports of their own; "12[3].server" is the number 123
        number = next(filter(None, map(environ.get, JOB_NUMBERS)), "").partition(".")[0]
        job = re.sub(r"\D", "", number)[-3:]
        # hosts of the launcher's options are not known
        address, port = "" if own_hosts else placed[0][0].name, FIRST_PORT + int(job or 0)
    found = {"MASTER_ADDR": environ.get("MASTER_ADDR") or address, "MASTER_PORT": environ.get("MASTER_PORT") or port}
    return {name: str(value) for name, value in found.items() if found["MASTER_ADDR"]}


# The program ----------------------------------------------------------------------------------------------------------


def _job(words: list[str]) -> Job:
    """Separate the launcher's options from the program, and find the program."""
    options: list[str] = []
    if words[:1] == ["--"]:
        words = words[1:]
        if words[:1] != ["-m"] and words and words[0].startswith("-"):
            if "--" not in words:
                raise ValueError(
                    "options after -- belong to the launcher; end them by a second --, as in "
                    "mpicomp run -n 4 -- --map-by node -- train.py"
                )
            at = words.index("--")
            options, words = words[:at], words[at + 1 :]
    if not words or words == ["-m"]:
        raise ValueError(f"name a program, as in {_EXAMPLE}")
    if words[0] == "-m":
        return Job([sys.executable, "-m", _module(words[1]), *words[2:]], options)
    return Job([*_program(words[0]), *words[1:]], options)


def _module(name: str) -> str:
    top = name.partition(".")[0]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
        raise ValueError(f"-m {name}: there is no module {top} here; install it, or start from the folder that has it")
    return name


def _program(name: str) -> list[str]:
    """Return the beginning of the command line for a script of Python or any other program."""
    path = Path(name)
    if path.is_file() and path.suffix in (".py", ".pyz"):
        return [sys.executable, name]
    # in a clone, mpicomp is a command and a folder that Python could run, but not as a package
    found = None if os.sep in name else shutil.which(name, path=with_python(os.environ.get("PATH", os.defpath)))
    if found is None and path.joinpath("__main__.py").is_file():
        return [sys.executable, name]
    if path.is_file():
        if not os.access(path, os.X_OK):
            raise ValueError(
                f"{name} is neither executable nor a .py file: chmod +x {name}, or name its interpreter first"
            )
        return [str(path.absolute())]
    if found is None and path.is_dir():
        raise ValueError(f"{name} is a folder without __main__.py: name a script or command in it")
    if found is None:
        scripts = [str(other) for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        here = f"in {Path.cwd()}" if not path.is_absolute() else "here"
        raise ValueError(f"there is no file or command {name} {here}{suggestion(name, scripts)}")
    return [found]


# Placement ------------------------------------------------------------------------------------------------------------


def _placement(launcher: Launcher, found: Allocation, n_ranks: int, n_threads: str, one_machine: bool) -> str:
    ranks = f"{n_ranks} rank{'s' * (n_ranks > 1)} of {n_threads} thread{'s' * (n_threads != '1')}"
    lines = [f"mpicomp run: {ranks}, by {launcher.command[0]} ({launcher.version})"]
    if one_machine:
        host = found.hosts[0]
        share = "" if n_ranks <= (host.cores or n_ranks) else ", which the ranks share"
        lines.append(f"mpicomp run: {host.name}: {_range(0, n_ranks)}, {_cores(host.cores)}{share}")
        return "\n".join(lines)
    first, placed = 0, found.place(n_ranks)
    for host, here in islice(placed, MOST_HOSTS_SHOWN):
        lines.append(f"mpicomp run: {host.name}: {_range(first, here)}, {_cores(host.cores)}")
        first += here
    if len(placed) > MOST_HOSTS_SHOWN:
        lines.append(f"mpicomp run: and {len(placed) - MOST_HOSTS_SHOWN} hosts more")
    return "\n".join(lines)


def _note_threads(environ: Mapping[str, str], taken: str, n_threads: int, placed: list[tuple[Host, int]]) -> str:
    """Return a line for a number of threads that cannot be used, or that lets them compete for cores."""
    given = environ.get(THREADS, "")
    if given and not IS_THREADS(given):
        return f"mpicomp run: {THREADS}={given} is no number of threads: {taken} is taken\n"
    if all(host.cores for host, _ in placed) and int(taken.partition(",")[0]) > n_threads:
        return f"mpicomp run: {THREADS}={given}: threads compete for cores; unset it, and a rank has {n_threads}\n"
    return ""


def _range(first: int, n: int) -> str:
    return f"rank {first}" if n == 1 else f"ranks {first} to {first + n - 1}"


def _cores(n: int | None) -> str:
    return "cores unknown" if n is None else f"{n} core{'s' * (n != 1)}"
