"""Texts that users and batch systems write: options, variables and host files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from apps.faults import parse_schedule
from apps.fuzz.scratch import scratch_file
from apps.fuzz.target import Target
from apps.performance.cluster.grid import Cluster, parse_size
from apps.train import options as train_options
from collectives import exit_without_mpi, launcher
from collectives.arrays.gpu_mpi import verdict
from collectives.communicator.arguments import timeouts
from collectives.cost.rate import EmulatedLink, Rate
from collectives.schedules.registry import topology
from mpicomp import algorithm
from mpicomp.cli import arguments
from mpicomp.cli.doctor import environment as doctor
from mpicomp.cli.run.allocation import find_allocation
from mpicomp.cli.run.environment import for_shell
from mpicomp.codecs import compressor

ERRORS = (ValueError, argparse.ArgumentTypeError)


def _each(*readers: Callable[[str], object]) -> Callable[[bytes], None]:
    """Give each reader the text; the errors of one do not keep the next from reading."""

    def run(content: bytes) -> None:
        text, failure = content.decode(errors="surrogateescape").replace("\0", ""), None
        for read in readers:
            try:
                read(text)
            except Exception as error:
                if type(error) not in ERRORS:
                    raise
                failure = error
        if failure is not None:
            raise failure

    return run


def _seeds(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _method(text: str) -> object:
    name, *options = text.split(" ")
    return algorithm(name, **dict(map(arguments.assignment, options)))


# Environments ---------------------------------------------------------------------------------------------------------

_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
    "PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE", "OMPI_MCA_orte_default_hostfile", "NCPUS",
    "MPICOMP_ONE_MACHINE", "OMP_NUM_THREADS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPICOMP_TIMEOUT",
    "MPICOMP_ARRIVAL_TIMEOUT", "MPICOMP_GPU_MPI", "MPICOMP_STATUS_AFTER_DEATH", "MPICOMP_ALONE",
)  # fmt: skip
_FILES = ("PBS_NODEFILE", "OMPI_MCA_orte_default_hostfile")


def _environ(content: bytes) -> dict[str, str]:
    """Return an environment: lines of a variable's number, a space and its value, up to an empty one; then a file."""
    head, _, file = content.partition(b"\n\n")
    found = {}
    for line in head.split(b"\n"):
        number, _, value = line.partition(b" ")
        name = _VARIABLES[int.from_bytes(number[:1], "little") % len(_VARIABLES)]
        found[name] = value.decode(errors="surrogateescape").replace("\0", "")
    for name in _FILES:
        if name in found:
            found[name] = str(scratch_file("hosts", file))
    return found


def _line(name: str, value: str) -> bytes:
    return bytes([_VARIABLES.index(name)]) + b" " + value.encode()


def _environ_seeds() -> list[bytes]:
    slurm = [
        _line("SLURM_JOB_ID", "7"), _line("SLURM_JOB_NODELIST", "n[1-2,07],m"),
        _line("SLURM_JOB_CPUS_PER_NODE", "4(x4)"), _line("SLURM_TASKS_PER_NODE", "2(x3),1"),
    ]  # fmt: skip
    return [
        b"\n".join(slurm),
        b"\n".join([*slurm, _line("SLURM_CPUS_PER_TASK", "2")]),
        _line("PBS_NODEFILE", "") + b"\n\na\na\nb\n",
        _line("OMPI_MCA_orte_default_hostfile", "") + b"\n\na slots=2\nb:3 # c\n",
        _line("LSB_MCPU_HOSTS", "a 2 b 3"),
        b"\n".join([_line("OMPI_COMM_WORLD_SIZE", "4"), _line("MPICOMP_TIMEOUT", "60")]),
        b"\n".join([_line("WORLD_SIZE", "4"), _line("RANK", "0"), _line("MPICOMP_STATUS_AFTER_DEATH", "75")]),
        _line("MPICOMP_ONE_MACHINE", "OMP_NUM_THREADS=1") + b"\n" + _line("OMP_NUM_THREADS", "1"),
    ]


def _read_allocation(content: bytes) -> None:
    environ = _environ(content)
    found = find_allocation(environ)
    if found is not None:
        found.place(4)
    for_shell(environ)


def _read_settings(content: bytes) -> None:
    environ: Mapping[str, str] = _environ(content)
    launcher.problem(1, environ)
    launcher.launched_by(environ)
    doctor.threads(1, environ, 2, 2.0)
    doctor.obstacles(environ)
    with mock.patch.dict("os.environ", {key: one for key, one in environ.items() if _is_encodable(one)}):
        exit_without_mpi.status_after_death()
        verdict.mode()
        timeouts(None, None)


def _is_encodable(value: str) -> bool:
    try:
        return bool(value.encode(errors="surrogateescape")) or True
    except UnicodeEncodeError:
        return False


def _read_quota(content: bytes) -> None:
    """Read the files of a container's control group: the process's own, and the limit."""
    own, _, limit = content.partition(b"\n\n")
    root = scratch_file("cpu.max", limit).parent
    doctor.quota(root, scratch_file("cgroup", own))
    doctor.quota(Path("/nonexistent"), scratch_file("cgroup", own))


TARGETS = [
    Target("links", "Rate.parse, EmulatedLink.parse", _seeds("100mbit", "1gbit,50us", "none", "2.5gbit,1ms"),
           _each(Rate.parse, EmulatedLink.parse), ERRORS),
    Target("numbers", "arguments.counts, integer, number, seconds", _seeds("25e6", "1e3,1e6", "1e3:1e6:10", "inf", "7"),
           _each(arguments.counts, arguments.count, lambda text: arguments.integer("--ranks", text, 1),
                 lambda text: arguments.number("--compute-ms", text, 0.0),
                 lambda text: arguments.seconds("--timeout", text)), ERRORS),
    Target("assignments", "arguments.assignment", _seeds("clip=inf", "full-precision-every=None", "a=(1,{2:[3]})"),
           _each(arguments.assignment), ERRORS),
    Target("methods", "algorithm", _seeds("marsit", "top-k-sgd rate=4", "qsgd levels=4 bucket=512", "dense"),
           _each(_method), (*ERRORS, TypeError)),
    Target("compressors", "compressor", _seeds("top-k:rate=50", "one-bit:bucket=512,scale=l1", "quantize:levels=None"),
           _each(compressor), ERRORS),
    Target("topologies", "topology", _seeds("ring", "torus:2x4", "halving-doubling"), _each(topology), ERRORS),
    Target("fault-schedules", "apps.faults.parse_schedule",
           _seeds("kill:3:5:before-barrier", "stop:0:2:before-call:1.5,corrupt:1:2:middle:77"),
           _each(parse_schedule), ERRORS),
    Target("cluster-options", "Cluster.parse, parse_size", _seeds("1gbit/100mbit", "64kB", "16MB", "none"),
           _each(lambda text: Cluster.parse(4, text), parse_size), ERRORS),
    Target("train-options", "types of apps.train's options", _seeds("500steps", "1,2", "none", "0.1", "a=1"),
           _each(train_options.positive, train_options._seed, train_options._positive_float, train_options._integers,
                 train_options._period, train_options._interval, train_options._assignment), ERRORS),
    Target("allocations", "find_allocation, for_shell: Slurm, PBS, LSF, host files", _environ_seeds, _read_allocation,
           ERRORS),
    Target("settings", "variables of launchers and of mpicomp", _environ_seeds, _read_settings, ERRORS),
    Target("quotas", "doctor.quota", lambda: [b"0::/\n\n\n100000 100000", b"3:cpu,x:/a/b\n", b"0::/..\n\nmax 1"],
           _read_quota, ()),
]  # fmt: skip
