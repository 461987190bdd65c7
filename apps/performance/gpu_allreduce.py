"""Time a one-bit all-reduce of gradients on GPUs against a dense one, in turn.

``mpirun -n 2 python -m apps.performance.gpu_allreduce``. Ranks take the GPUs of their node in turn, and share them
where there are more ranks than GPUs. ``--mb`` sets the length of the vectors. Calls begin at a barrier and end when the
slowest rank has the result on its GPU; medians count. The dense all-reduce is staged: vectors travel through the host's
memory. With the environment's ``MPICOMP_GPU_MPI=auto`` it hands memory of GPUs to MPI, where MPI takes it. NCCL and
`PerNode` over NCCL are timed where no ranks share a GPU; ``--ranks-per-node`` makes nodes of neighbours on one machine.

Copying is hidden to the share of its time in which kernels of the same rank ran on the GPU: (copies + kernels - both)
/ copies, where each is the time in which at least one was under way, of whole calls, by PyTorch's profiler. So a copy
is not hidden that the GPU makes while it waits for signs to travel. Where ranks share a GPU, a kernel's time has in it
that of others whose turn came in between.

Memory is PyTorch's peak (``torch.cuda.max_memory_allocated``) in `CALLS` calls and before them, beyond the
vector, the residual and the result.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.gpu_machine import Place, choose_gpu, parser_of, positive, run_part, software
from apps.performance.gpu_nccl import nccl_allreduce, why_not
from apps.performance.gpu_profile import TO_DEVICE, TO_HOST, hidden_share, record
from apps.performance.part import MS, Part, Row, both, format_seconds, get, make_record, table
from apps.records import Record
from collectives import Communicator
from collectives.arrays import gpu_mpi
from mpicomp.cli.timing import alternate, gather

ONE_BIT, NCCL = "Marsit on the GPU", "NCCL"
CALLS = 3
AT_LEAST, PIECES, HIDDEN = 10, 2, 0.8  # targets
MARSIT = mpicomp.Marsit(full_precision_every=None)
WAYS = {"to the host": TO_HOST, "to the device": TO_DEVICE, "both ways": TO_HOST + TO_DEVICE}


def measure(mb: float, repeats: int, ranks_per_node: int | None = None) -> Record | None:
    """Time all-reduces of `mb` megabytes of float32; collective. None on ranks other than 0, and without GPUs."""
    os.environ.setdefault(gpu_mpi.VARIABLE, "off")
    with Communicator(ranks_per_node=ranks_per_node) as comm:
        place = choose_gpu(comm, "all-reduces on GPUs are")
        if place is None:
            return None
        n = max(1, round(mb * 1e6 / 4))
        x, out = gradients(n, place, comm.rank)
        timed, lack = _time_calls(comm, place, x, out, repeats)
        rows = compare(timed, dense_name())
        memory = _memory(comm, place, x, out)
        staging = _measure_staging(comm, place, x, out)
        settings = {"mb": mb, "ranks": comm.size, "a GPU each": place.alone, "repeats": repeats,
                    gpu_mpi.VARIABLE: gpu_mpi.mode(), **software()}  # fmt: skip
        return (
            None if comm.rank else {**make_record(rows, **settings), "staging": staging, "memory": memory, "nccl": lack}
        )


def gradients(n: int, place: Place, rank: int) -> tuple[Any, Any]:
    """Normal values of a rank on its GPU, and room for the result."""
    import torch

    random = torch.Generator(place.device).manual_seed(rank)
    x = torch.randn(n, generator=random, device=place.device)
    return x, torch.empty_like(x)


def dense_name() -> str:
    """Return the name of the dense all-reduce, by the memory that MPI is handed."""
    mode = gpu_mpi.mode()
    return "dense, staged" if mode == "off" else f"dense, {gpu_mpi.VARIABLE}={mode}"


def _time_calls(
    comm: Communicator, place: Place, x: Any, out: Any, repeats: int
) -> tuple[dict[str, dict[str, float]], str]:
    """Return median and minimum of each call, and the reason if NCCL is missing; collective."""
    calls: dict[str, Callable[[], object]] = {
        ONE_BIT: partial(MARSIT.start(comm, x.shape[0], device=place.device).aggregate, x, out),
        dense_name(): partial(comm.allreduce, x, "mean", out),
    }
    if not why_not(place) and comm.size > 1:
        inside = {
            "nccl": (mpicomp.PerNode(MARSIT, local="nccl"), place.device),
            "auto": (mpicomp.PerNode(MARSIT), "cpu"),
        }
        for local, (method, device) in inside.items():
            aggregate = method.start(comm, x.shape[0], device=device).aggregate
            calls[f"PerNode(Marsit, {local!r})"] = partial(aggregate, x, out)
    with nccl_allreduce(comm, place, x) as (call, lack):
        if call is not None:
            calls[NCCL] = call
        return {name: summary(seconds) for name, seconds in alternate(calls, repeats, comm=comm).items()}, lack


def compare(timed: dict[str, dict[str, float]], reference: str) -> list[Row]:
    """A row for each call: how many times as fast it is as the `reference`, by medians and by minima."""
    held = timed[reference]
    return [
        {
            "call": name,
            **of,
            "speedup": held["median_s"] / of["median_s"],
            "speedup_of_minima": held["min_s"] / of["min_s"],
            "target": f"≥ {AT_LEAST}" if name == ONE_BIT else "",
        }
        for name, of in timed.items()
    ]


def _memory(comm: Communicator, place: Place, x: Any, out: Any) -> dict[str, float]:
    """Most bytes on the GPU beyond vector, residual and result, and bytes of a piece: the greatest; collective."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    aggregator = MARSIT.start(comm, x.shape[0], device=place.device)
    for _ in range(CALLS):
        aggregator.aggregate(x, out)
    residual: Any = aggregator.residual
    beyond = torch.cuda.max_memory_allocated() - before - residual.numel() * residual.element_size()
    reducer: Any = aggregator.reducer
    piece = max(map(len, reducer.pieces)) * residual.element_size()
    most = gather(comm, np.array([beyond, piece], np.float64)).max(axis=0)
    return {"beyond": float(most[0]), "piece": float(most[1])}


def _measure_staging(comm: Communicator, place: Place, x: Any, out: Any) -> list[Row]:
    """Return the seconds of a call's copies in each direction, and their hidden share; means over ranks; collective."""
    aggregator = MARSIT.start(comm, x.shape[0], device=place.device)
    aggregator.aggregate(x, out)

    def calls() -> None:
        for _ in range(CALLS):
            aggregator.aggregate(x, out)

    found = record(calls)
    kernels = [one for one in found if not one.crosses]
    rows: list[Row] = []
    for way, names in WAYS.items():
        copies = [one for one in found if one.name.startswith(names)]
        share = hidden_share(copies, kernels)
        mine = [sum(one.end_s - one.start_s for one in copies) / CALLS, np.nan if share is None else share]
        seconds, mean = gather(comm, np.array(mine, np.float64)).mean(axis=0).tolist()
        rows.append({"copies": way, "seconds": seconds, "hidden": None if np.isnan(mean) else mean})
    return rows


def note(record: Record) -> str:
    """Describe copies, memory, and the reason if NCCL is missing."""
    memory, lack = record["memory"], record["nccl"]
    pieces = memory["beyond"] / memory["piece"]
    said = (
        f"Memory on the GPU beyond vector, residual and result: {memory['beyond'] / 1e6:.1f} MB, which is {pieces:.2f} "
        f"pieces of {memory['piece'] / 1e6:.1f} MB (target: ≤ {PIECES})."
    )
    return f"\n\n{table(STAGING, record['staging'])}\n\n{said}" + (f" NCCL is not timed: {lack}." if lack else "")


def _format_hidden(row: Row) -> str:
    return "not measured: the profiler shows no copies" if row["hidden"] is None else f"{row['hidden']:.0%}"


STAGING = (
    ("copies of a call", get("copies")),
    ("ms", lambda row: format_seconds(row["seconds"], MS)),
    ("hidden behind kernels", _format_hidden),
    ("target", lambda row: f"≥ {HIDDEN:.0%}" if row["copies"] == "both ways" else ""),
)
COLUMNS = (
    ("all-reduce", get("call")),
    ("median (min), ms", lambda row: both(row, MS)),
    ("times as fast as dense", get("speedup", ".2f")),
    ("of minima", get("speedup_of_minima", ".2f")),
    ("target", get("target")),
)
PART = Part(
    "gpu_allreduce",
    "One-bit all-reduces of vectors on GPUs against dense ones. --mb MB: of float32 (1000; with --quick 4).",
    measure,
    COLUMNS,
    quick={"mb": 4.0, "repeats": 3},
    full={"mb": 1000.0, "repeats": 15},
    note=note,
    ranks=(2, 4),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0 too where there is no GPU."""
    parser = parser_of(PART)
    parser.add_argument("--mb", type=positive(float))
    parser.add_argument("--ranks-per-node", type=positive(int))
    return run_part(PART, argv, parser)


if __name__ == "__main__":
    sys.exit(main())
