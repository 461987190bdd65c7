"""Findings about GPUs: their names, the way from their memory to MPI, and its speed."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicomp.cli.doctor.finding import Finding, examine, first_ranks

if TYPE_CHECKING:
    from collectives.arrays import Device
    from collectives.arrays.gpu_mpi.verdict import Outcome


# `collectives` is imported by functions: the doctor works where that is another package.
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
COPIED_BYTES = 64 << 20
REPEATS = 5


def findings() -> list[Finding]:
    """Return the findings about GPUs, without importing PyTorch if there is no driver."""
    driver = any(file.exists() for file in DRIVERS)
    names = gpu_names()
    found = [
        examine("GPUs", lambda: present(driver, names)),
        examine("MPI and GPUs", report_claims),
        examine("arrays on GPUs", lambda: way(bool(names))),
    ]
    if names:
        found.append(examine("copies of GPUs", lambda: copies(_open_gpu())))
    return found


class Seen(NamedTuple):
    """GPUs that a rank finds: their number, the driver's text for the rank's own one, and whether NCCL is there."""

    n_gpus: int = 0
    identity: str = ""
    has_nccl: bool = False


def seen(local_rank: int) -> Seen:
    """Return the GPUs for the rank with this number on its host, without importing PyTorch if there is no driver."""
    names = gpu_names()
    if not names:
        return Seen()
    import torch
    from torch import distributed

    index, identity = 0 if len(names) == 1 else local_rank, ""
    with suppress(RuntimeError, AssertionError):  # of a GPU that is not there, or is another program's
        found = torch.cuda.get_device_properties(index)
        identity = str(getattr(found, "uuid", "")) or f"{platform.node()}:{index}"  # older PyTorch has no uuid
    return Seen(len(names), identity, distributed.is_available() and distributed.is_nccl_available())


def of_ranks(hosts: Sequence[str], found: Sequence[Seen]) -> list[Finding]:
    """Return the finding about the GPUs of the ranks of a job, whose hosts are given; none without a job or a GPU."""
    if len(found) == 1 or not any(one.n_gpus for one in found):
        return []
    name, cure = "ranks and GPUs", "start a rank for each GPU: mpicomp run --gpus"
    on_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        on_host.setdefault(host, []).append(rank)
    for host, ranks in on_host.items():
        count, own = found[ranks[0]].n_gpus, {found[rank].identity for rank in ranks} - {""}
        if not count:
            text = f"no GPU is found on {host} by {first_ranks(ranks)}, and other hosts have some"
            return [Finding(name, "warn", text, "request GPUs on every host")]
        if len(own) < len(ranks):
            text = f"{len(ranks)} ranks on {host} share {len(own)} GPU{'s' * (len(own) != 1)}"
            return [Finding(name, "warn", f"{text}, and NCCL takes one for each rank", cure)]
        if count > len(ranks):
            return [Finding(name, "warn", f"{len(ranks)} of the {count} GPUs on {host} have a rank", cure)]
    lacking = [rank for rank, one in enumerate(found) if not one.has_nccl]
    if lacking:
        text = f"PyTorch of {first_ranks(lacking)} has no NCCL"
        return [Finding(name, "warn", text, "install PyTorch's build for the GPU (pytorch.org, Get Started)")]
    several = f" on {len(on_host)} hosts" if len(on_host) > 1 else ""
    return [Finding(name, "ok", f"a GPU for each of {len(found)} ranks{several}, and NCCL")]


def present(driver: bool, names: list[str]) -> Finding:
    """Report the GPUs that PyTorch finds, and whether Triton is installed."""
    if not driver:
        return Finding("GPUs", "ok", "none: there is no driver")
    if not names:
        cure = "install PyTorch's build for the GPU (pytorch.org, Get Started), or leave GPUs alone"
        return Finding("GPUs", "warn", "there is a driver, but PyTorch finds no GPU", cure)
    listed = ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names))
    try:
        return Finding("GPUs", "ok", f"{listed}; Triton {version('triton')}")
    except PackageNotFoundError:
        cure = "pip install triton, for vectors to be encoded on the GPU: start(comm, n, device='cuda')"
        return Finding("GPUs", "warn", f"{listed}; there is no Triton", cure)


def report_claims() -> Finding:
    """Report the claims of the MPI library, without using CUDA or a driver."""
    from collectives.arrays.gpu_mpi.claims import are_positive, claims

    found = claims()
    listed = ", ".join(f"{claim.source} {'yes' if claim.aware else 'no'}" for claim in found)
    if not found:
        return Finding("MPI and GPUs", "ok", "the MPI library makes no claim about memory of GPUs")
    takes = "takes" if are_positive(found) else "does not take"
    return Finding("MPI and GPUs", "ok", f"by its own claims, the MPI library {takes} memory of GPUs: {listed}")


def way(there_are_gpus: bool) -> Finding:
    """Report the way from the GPU's memory to MPI; it is tried if there is a GPU, or if the user requires it."""
    from collectives.arrays.gpu_mpi import VARIABLE, mode

    try:
        chosen = mode()
    except ValueError as error:
        return Finding("arrays on GPUs", "FAIL", str(error), f"unset {VARIABLE}")
    if chosen != "on" and not there_are_gpus:
        return Finding("arrays on GPUs", "ok", f"{VARIABLE}={chosen}, not tried without a GPU")
    outcome = _probe()
    if outcome.works:
        text = f"long dense sums are direct, MPI reads the GPU's memory ({VARIABLE}={chosen}); the probe {outcome.said}"
        return Finding("arrays on GPUs", "ok", text)
    text = f"staged, they go through pinned memory of the host ({VARIABLE}={chosen}); the probe {outcome.said}"
    if chosen == "on":
        return Finding("arrays on GPUs", "FAIL", text, f"set {VARIABLE}=auto, or load an MPI library for your GPUs")
    return Finding("arrays on GPUs", "ok", text)


def copies(device: Device) -> Finding:
    """Measure the copies of staging, to the host and back, and for comparison a copy within the host's memory."""
    from collectives.arrays import wait

    there, here = device.zeros(COPIED_BYTES, "uint8"), device.pinned(COPIED_BYTES)
    other = np.zeros(COPIED_BYTES, np.uint8)
    to_host = _gb_s(lambda: wait(device.copy(there, here)))
    back = _gb_s(lambda: wait(device.copy(here, there)))
    within = _gb_s(lambda: np.copyto(other, here))
    text = f"{device.name} to the host {to_host:.1f} GB/s, back {back:.1f} GB/s; the host copies {within:.1f} GB/s"
    return Finding("copies of GPUs", "ok", text)


def _gb_s(copy: Callable[[], object]) -> float:
    """Return the speed of the fastest of a few copies."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - start)
    return COPIED_BYTES / 1e9 / max(1e-9, min(seconds))


def gpu_names() -> list[str]:
    """Return the names of the GPUs that PyTorch finds, without importing it if there is no driver."""
    return _names() if any(file.exists() for file in DRIVERS) else []


def _names() -> list[str]:
    """Return the names of the GPUs that PyTorch finds."""
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _open_gpu() -> Device:
    from collectives.arrays import named

    return named("cuda")


def _probe() -> Outcome:
    from collectives.arrays.gpu_mpi.verdict import current_device, verdict

    verdict.begin(current_device())
    return verdict.end()
