"""Hosts, slots and cores that a batch system has granted, read from the environment of its job."""

from __future__ import annotations

import itertools
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from collectives.regular_file import open_regular
from mpicomp.cli.doctor.environment import quota

# Host files that launchers read by themselves; the first two are set by Kubernetes' MPI operator.
HOST_FILES = (
    "OMPI_MCA_orte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
    "PRTE_MCA_prte_default_hostfile",
)
MOST_HOSTS = 1 << 18  # of a list, which a range of a few characters may exceed by far
_MOST_DIGITS = 9
TOPOLOGY = Path("/sys/devices/system/cpu")
DEVICES = Path("/dev")
_SLURMS_GPUS = "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_IS_GPU = re.compile(r"\s*(?:\d|GPU-|MIG-)").match


class Host(NamedTuple):
    """A host of a job; `cores` is None if the batch system does not state their number."""

    name: str
    slots: int
    cores: int | None = None


class Allocation(NamedTuple):
    """Hosts of a job, in the order in which launchers fill them."""

    grantor: str  # in words, as in "the allocation of Slurm"
    cure: str  # advice where it is too small
    hosts: tuple[Host, ...]
    host_file: str = ""

    @property
    def slots(self) -> int:
        """Number of ranks for which there is room."""
        return sum(host.slots for host in self.hosts)

    def place(self, n_ranks: int) -> list[tuple[Host, int]]:
        """Return the hosts that get ranks and how many, one host filled after the other."""
        placed = []
        for host in self.hosts:
            here = min(host.slots, n_ranks)
            n_ranks -= here
            if here:
                placed.append((host, here))
        return placed


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process is in, or None; ValueError if its description cannot be read."""
    if environ.get("SLURM_JOB_ID"):
        return _slurm(environ)
    if path := environ.get("PBS_NODEFILE"):
        cure = "ask for more, as in qsub -l select=2:ncpus=4:mpiprocs=4"
        return Allocation("the allocation of PBS", cure, _count(_read("PBS_NODEFILE", path), environ))
    if hosts := environ.get("LSB_MCPU_HOSTS"):
        cure, words = "ask for more, as in bsub -n 8", hosts.split()
        slots: dict[str, int] = {}
        for name, count in zip(words[::2], words[1::2], strict=False):
            slots[name] = slots.get(name, 0) + _number(count)
        return Allocation(
            "the allocation of LSF", cure, _with_cores(slots, environ), environ.get("LSB_DJOB_HOSTFILE", "")
        )
    for name in HOST_FILES:
        if path := environ.get(name):
            cure = "add hosts or slots to it"
            return Allocation(f"the host file {path}", cure, _count(_read(name, path), environ), path)
    return None


# Batch systems --------------------------------------------------------------------------------------------------------


def _slurm(environ: Mapping[str, str]) -> Allocation:
    names = _few(expand(environ.get("SLURM_JOB_NODELIST", "") or platform.node()))
    cores = _expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) or [1] * len(names)
    slots = _expand_counts(environ.get("SLURM_TASKS_PER_NODE", "")) or cores
    if not len(names) == len(slots) == len(cores):
        raise ValueError(
            f"SLURM_JOB_NODELIST names {len(names)} nodes, SLURM_TASKS_PER_NODE {len(slots)} and "
            f"SLURM_JOB_CPUS_PER_NODE {len(cores)}; start the job with sbatch or salloc"
        )
    hosts = tuple(Host(*about) for about in zip(names, slots, cores, strict=True))
    return Allocation("the allocation of Slurm", "ask for more, as in sbatch --nodes=2 --ntasks-per-node=4", hosts)


def expand(names: str) -> Iterator[str]:
    """Yield the hosts of a list of Slurm's: ``n[1-2,07],m`` are n1, n2, n07 and m."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        pieces = re.split(r"\[([^\]]*)\]", part)
        pieces[1::2] = [_few(_ranges(piece)) for piece in pieces[1::2]]
        pieces[::2] = [[piece] for piece in pieces[::2]]
        yield from map("".join, itertools.product(*pieces))


def _few(names: Iterator[str]) -> list[str]:
    """Return the names as a list; ValueError if there are more than hosts of any machine."""
    found = list(itertools.islice(names, MOST_HOSTS + 1))
    if len(found) > MOST_HOSTS:
        raise ValueError(f"SLURM_JOB_NODELIST names more than {MOST_HOSTS} nodes: the variable is damaged")
    return found


def _ranges(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not dash:
            yield first
        else:
            yield from (f"{number:0{len(first)}}" for number in range(_number(first), _number(last) + 1))


def _expand_counts(text: str) -> list[int]:
    """Return the numbers of ``"4(x2),1"``: 4, 4 and 1."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        number, _, times = part.rstrip(")").partition("(x")
        n_times = _number(times) if times else 1
        if len(found) + n_times > MOST_HOSTS:
            raise ValueError(f"{text!r:.80} is of more than {MOST_HOSTS} nodes: the variable is damaged")
        found += [_number(number)] * n_times
    return found


def _read(variable: str, path: str) -> list[str]:
    try:
        with open_regular(path) as file:
            return file.read().decode().splitlines()
    except OSError as error:
        raise ValueError(f"{variable}={path}: {error.strerror}; the batch system should have written it") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{variable}={path}: no text in UTF-8 ({error.reason}); name a list of hosts") from error


def _count(lines: list[str], environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of a file with a line for each slot, or for each host: ``h``, ``h slots=2`` or ``h:2``."""
    slots: dict[str, int] = {}
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            name, _, count = words[0].partition(":")
            named = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
            slots[name] = slots.get(name, 0) + _number((named or [count or "1"])[0])
    return _with_cores(slots, environ)


def _with_cores(slots: Mapping[str, int], environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return hosts; if this process runs on one of them, each slot is taken to have as many cores as here."""
    here = slots.get(platform.node()) or slots.get(platform.node().partition(".")[0])
    own = cores()
    bound = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    # a batch system that binds no processes leaves the whole machine visible
    own = own if bound else min(own, _number(environ.get("NCPUS", "")) or here or 1)
    return tuple(Host(name, n, None if here is None else max(1, own * n // here)) for name, n in slots.items())


def _number(text: str) -> int:
    if text and not (text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise ValueError(f"{text!r:.80} should be a number: the variables of the batch system cannot be read")
    return int(text or 0)


# This machine ---------------------------------------------------------------------------------------------------------


def cores() -> int:
    """Return the number of cores that this process may use: a core has one thread or more, a container a quota."""
    siblings = {_siblings(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, int(min(len(siblings), quota())))


def _siblings(cpu: int) -> str:
    try:
        return (TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs of a node: those that Slurm has granted and the user left visible, else all here."""
    granted = [text for name in _SLURMS_GPUS if environ.get("SLURM_JOB_ID") and (text := environ.get(name))]
    visible = [environ[name] for name in _VISIBLE_GPUS if name in environ]
    # as in "4" and "h100:4"
    numbers = [sum(_number(part.rpartition(":")[2]) for part in text.split(",")) for text in granted[:1]]
    # CUDA ignores all devices after one that does not exist
    numbers += [len([*itertools.takewhile(_IS_GPU, text.split(","))]) for text in visible[:1]]
    if numbers:
        return min(numbers)
    nvidia = [file for file in DEVICES.glob("nvidia*") if file.name.removeprefix("nvidia").isdecimal()]
    amd = DEVICES.glob("dri/renderD*") if (DEVICES / "kfd").exists() else ()
    return len(nvidia) or len([*amd])


def this_machine() -> Allocation:
    """Return the cores of this machine as slots."""
    return Allocation("this machine", "", (Host(platform.node(), cores(), cores()),))
