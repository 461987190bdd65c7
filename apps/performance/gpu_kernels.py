"""Time the GPU's kernels against a copy on the device, in turn. Minima count.

``python -m apps.performance.gpu_kernels``. A kernel's bytes are those that must move: each input read once and each
result written once. The share of the copy's bandwidth that it reaches with them says how far it is from the best.
``--count N`` times vectors of N elements. With ``--numba-cuda`` two kernels that numba.cuda compiles stand beside those
of the package, to compare compilers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np

from apps.performance.durations import summary
from apps.performance.gpu_calls import COPY, calls, calls_by_numba
from apps.performance.part import US, Part, Row, get, in_unit, make_record
from apps.records import Record
from mpicomp.cli.timing import turns

WARMUP = 3


def name_missing(numba_cuda: bool) -> str:
    """Return the missing requirement of a measurement; empty if everything is there."""
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            return f"the package {package} is not installed"
    import torch

    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if numba_cuda:
        from numba import cuda

        return "" if cuda.is_available() else "numba.cuda finds no GPU or no CUDA toolkit (leave out --numba-cuda)"
    return ""


def time_on_device(timed: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Any]:
    """Time calls in turn by the device's clock: float64[repeats] seconds of each."""
    import torch

    event: Any = torch.cuda.Event
    for name in turns(dict.fromkeys(timed, WARMUP)):
        timed[name]()
    marks: dict[str, list[Any]] = {name: [] for name in timed}
    for name in turns(dict.fromkeys(timed, repeats)):
        pair = [event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        timed[name]()
        pair[1].record()
        marks[name].append(pair)
    torch.cuda.synchronize()
    return {name: np.array([1e-3 * start.elapsed_time(end) for start, end in of]) for name, of in marks.items()}


def measure(n: int, repeats: int, numba_cuda: bool = False) -> Record | None:
    """Time all kernels on vectors of `n` elements; None, with a message, where that cannot be."""
    lack = name_missing(numba_cuda)
    if lack:
        print(f"{lack}: the GPU's kernels are not measured", file=sys.stderr)
        return None
    import torch

    found = calls(n, "cuda")
    if numba_cuda:
        found |= calls_by_numba(n, {name: nbytes for name, (_, nbytes) in found.items()})
    seconds = time_on_device({name: call for name, (call, _) in found.items()}, repeats)
    timed, nbytes = {name: summary(of) for name, of in seconds.items()}, {name: of for name, (_, of) in found.items()}
    return make_record(
        rows(timed, nbytes),
        n=n, repeats=repeats, device=torch.cuda.get_device_name(), torch=torch.__version__, triton=version("triton"),
    )  # fmt: skip


def rows(timed: Mapping[str, Mapping[str, float]], nbytes: Mapping[str, int]) -> list[Row]:
    """Return for each call the seconds, the bytes that it must move, the bandwidth and its share of the copy's."""
    copied = nbytes[COPY] / timed[COPY]["min_s"]
    return [
        {"kernel": name, **timed[name], "bytes": nbytes[name], "bytes_per_s": nbytes[name] / timed[name]["min_s"],
         "share": nbytes[name] / timed[name]["min_s"] / copied}
        for name in timed
    ]  # fmt: skip


COLUMNS = (
    ("kernel", get("kernel")),
    ("min, µs", in_unit("min_s", US)),
    ("median, µs", in_unit("median_s", US)),
    ("MB that must move", lambda row: f"{row['bytes'] / 1e6:.1f}"),
    ("GB/s", lambda row: f"{row['bytes_per_s'] / 1e9:.0f}"),
    ("share of the copy's bandwidth", get("share", ".2f")),
)
PART = Part(
    "gpu_kernels",
    "Kernels of the GPU against a copy on the device. --count N: elements. --numba-cuda: pack and merge by numba.cuda "
    "too.",
    measure,
    COLUMNS,
    quick={"n": 1_000_000, "repeats": 5},
    full={"n": 100_000_000, "repeats": 60},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0 too where there is no GPU."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--numba-cuda", action="store_true")
    parser.add_argument("--count", type=int)
    options, others = parser.parse_known_args(argv)
    also = {"numba_cuda": options.numba_cuda} | ({"n": options.count} if options.count else {})
    return replace(PART, quick={**PART.quick, **also}, full={**PART.full, **also}).main(others)


if __name__ == "__main__":
    sys.exit(main())
