"""All-reduces over the backend "mpicomp" and over Gloo where ranks share cores, alone and among busy processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from apps.performance.durations import elapsed_and_processor
from apps.performance.part import Column, Part, Row, format_seconds, make_record
from apps.performance.torch_backend import BACKENDS
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import slowest, turns

LARGE = 1 << 25  # bytes, from which on calls are timed a tenth as often
SETTLING_S = 1.0  # of busy processes, before anything is timed


def measure(sizes: Sequence[int], busy: Sequence[int], repeats: int) -> Record | None:
    """Time all-reduces of tensors of so many bytes among so many busy processes; collective."""
    import torch
    import torch.distributed as dist

    from mpicomp.torch import register_backend

    torch.set_num_threads(1)
    register_backend()
    dist.init_process_group("mpicomp")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rows: list[Row] = []
    with Communicator() as comm:
        for n_busy in busy:
            with busy_processes(n_busy if comm.rank == 0 else 0):
                comm.barrier()
                for nbytes in sizes:
                    times = max(3, repeats // 10) if nbytes >= LARGE else repeats
                    tensor = torch.zeros(nbytes // 4)
                    calls = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
                    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
                    for call in calls.values():
                        call()
                    for name in turns(dict.fromkeys(calls, times)):
                        timed[name].append(elapsed_and_processor(calls[name], comm))
                    row: Row = {"busy": n_busy, "bytes": nbytes}
                    for name, pairs in timed.items():
                        seconds, processor = np.array(pairs).T
                        row[f"{name}_s"] = float(np.median(slowest(seconds.copy(), comm)))
                        row[f"{name}_processor_s"] = float(np.median(comm.allreduce(processor.copy())))
                    rows.append(row)
        told = make_record(rows, sizes=list(sizes), ranks=comm.size, repeats=repeats)
        rank = comm.rank
    dist.destroy_process_group()
    return None if rank else told


@contextmanager
def busy_processes(n: int) -> Iterator[None]:
    """Keep so many processes busy, each of which would use a whole core."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        time.sleep(SETTLING_S if n else 0)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _milliseconds(name: str) -> Column:
    return (
        f"{'Gloo' if name == 'gloo' else name}, ms (processor)",
        lambda row: f"{format_seconds(row[f'{name}_s'], 1e-3)} ({format_seconds(row[f'{name}_processor_s'], 1e-3)})",
    )


COLUMNS: Sequence[Column] = (
    ("busy processes", lambda row: str(row["busy"])),
    ("bytes", lambda row: f"{row['bytes']:,}"),
    *map(_milliseconds, BACKENDS),
    ("over Gloo", lambda row: f"{row['mpicomp_s'] / row['gloo_s']:.2f}"),
)
PART = Part(
    "torch_load",
    'All-reduces over "mpicomp" and over Gloo, 4 ranks on the cores there are, alone and among busy processes.',
    measure,
    COLUMNS,
    quick={"sizes": (1 << 16,), "busy": (0, 1), "repeats": 5},
    full={"sizes": (1 << 16, 4_000_000, 100_000_000), "busy": (0, 2), "repeats": 100},
    ranks=(4,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
