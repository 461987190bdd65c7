"""Parts that the programs for GPUs share: the GPU of each rank, the message where a GPU is missing, and options."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from apps.performance.gpu_kernels import name_missing
from apps.performance.part import Part
from collectives import Communicator

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


class Place(NamedTuple):
    """Place where a rank computes."""

    device: str  # such as "cuda:0"
    alone: bool  # no two ranks of the job share a GPU


def choose_gpu(comm: Communicator, what: str) -> Place | None:
    """Choose this rank's GPU: its place among its node's ranks, modulo GPUs; None if a rank has no GPU. Collective."""
    lacks = comm.allgather_object(name_missing(numba_cuda=False))
    lack = next((f"rank {rank} of {comm.size}: {one}" for rank, one in enumerate(lacks) if one), "")
    if lack:
        if comm.rank == 0:
            print(f"{lack}: {what} not measured", file=sys.stderr, flush=True)
        return None
    import torch

    count = torch.cuda.device_count()
    index = comm.local_rank % count
    torch.cuda.set_device(index)
    gpus = comm.allgather_object(identity(index))
    return Place(f"cuda:{index}", len(set(gpus)) == comm.size)


def identity(index: int) -> str:
    """Return an identifier of a GPU that does not depend on the GPUs that a rank can see."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def software() -> dict[str, str]:
    """Return the GPU's name and its driver, for a record's settings."""
    import torch

    return {
        "device": torch.cuda.get_device_name(), "driver": driver_version(), "torch": torch.__version__,
        "triton": version("triton"),
    }  # fmt: skip


def driver_version(files: Sequence[Path] = DRIVERS) -> str:
    """Return the version of the first driver whose file is there: the first number with a point in it."""
    text = next((file.read_text() for file in files if file.exists()), "")
    found = re.search(r"\d+(\.\d+)+", text)
    return found[0] if found else "unknown"


def run_part(part: Part, argv: Sequence[str] | None, parser: argparse.ArgumentParser) -> int:
    """Run the program of a part that has options of its own, which stand for those of both its forms."""
    options, others = parser.parse_known_args(argv)
    also = {name: value for name, value in vars(options).items() if value is not None}
    return replace(part, quick={**part.quick, **also}, full={**part.full, **also}).main(others)


def parser_of(part: Part) -> argparse.ArgumentParser:
    """Return a parser of the options of `run_part`, to which the part's own are added."""
    return argparse.ArgumentParser(
        prog=f"python -m apps.performance.{part.module}", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS
    )


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of an option that takes a positive number."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
        return value

    return read
