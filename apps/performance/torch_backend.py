"""Calls of `torch.distributed` over the backend "mpicomp" and over Gloo, in turn, on one machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from apps.performance.durations import summary
from apps.performance.part import US, Column, Part, Row, both, make_record
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import alternate

BACKENDS = ("gloo", "mpicomp")
FEW = 1 << 22  # bytes, from which on calls are timed a tenth as often


def measure(sizes: Sequence[int], repeats: int) -> Record | None:
    """Time calls of tensors of so many bytes; collective."""
    import torch
    import torch.distributed as dist

    from mpicomp.torch import register_backend

    torch.set_num_threads(1)
    register_backend()
    dist.init_process_group("mpicomp")
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in BACKENDS}
    rows: list[Row] = []
    with Communicator() as comm:
        for nbytes in sizes:
            for call, make in CALLS.items():
                if nbytes != sizes[0] and call == "barrier":
                    continue
                times = max(3, repeats // 10) if nbytes >= FEW else repeats
                sides = {name: make(groups[name], nbytes // 4) for name in BACKENDS}
                timed = alternate(sides, times, 2, comm)
                rows.append({"call": call, "bytes": nbytes, **{name: summary(one) for name, one in timed.items()}})
        told = make_record(rows, sizes=list(sizes), ranks=comm.size, repeats=repeats)
        rank = comm.rank
    dist.destroy_process_group()
    return None if rank else told


def _all_reduce(group: Any, n: int) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    return partial(dist.all_reduce, torch.zeros(n), group=group)


def _broadcast(group: Any, n: int) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    return partial(dist.broadcast, torch.zeros(n), 0, group=group)


def _all_gather(group: Any, n: int) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    return partial(dist.all_gather, list(torch.zeros(size, n)), torch.zeros(n), group=group)


def _reduce_scatter(group: Any, n: int) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    size = dist.get_world_size()
    return partial(dist.reduce_scatter, torch.zeros(n), list(torch.zeros(size, n)), group=group)


def _barrier(group: Any, n: int) -> Callable[[], object]:
    import torch.distributed as dist

    return partial(dist.barrier, group=group)


def _round_trip(group: Any, n: int) -> Callable[[], object]:
    """Send a message from rank 0 to rank 1 and back."""
    import torch
    import torch.distributed as dist

    tensor, rank = torch.zeros(n), dist.get_rank()

    def there_and_back() -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(tensor, 1 - sender, group=group)
            elif rank == 1 - sender:
                dist.recv(tensor, sender, group=group)

    return there_and_back


CALLS: dict[str, Callable[[Any, int], Callable[[], object]]] = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "send and receive, there and back": _round_trip,
}
COLUMNS: Sequence[Column] = (
    ("call", lambda row: row["call"]),
    ("bytes", lambda row: "" if row["call"] == "barrier" else f"{row['bytes']:,}"),
    ("Gloo, µs", lambda row: both(row["gloo"], US)),
    ("mpicomp, µs", lambda row: both(row["mpicomp"], US)),
    ("over Gloo", lambda row: f"{row['mpicomp']['median_s'] / row['gloo']['median_s']:.2f}"),
)
PART = Part(
    "torch_backend",
    'Calls of torch.distributed over "mpicomp" and over Gloo.',
    measure,
    COLUMNS,
    quick={"sizes": (8, 1 << 16), "repeats": 5},
    full={"sizes": (8, 1 << 16, 1 << 24), "repeats": 200},
    ranks=(2, 4),
)

if __name__ == "__main__":
    sys.exit(PART.main())
