"""Host's time of a training step with overlap on a GPU whose work is empty: hooks, calls, launches, copies and events.

``mpirun -n 1 python -m apps.performance.host_time``, on a machine without a GPU. Where the host launches kernels hardly
faster than a GPU runs them, each microsecond of these lengthens the step. Time is processor time of all threads of the
process, less that of the same step without communication, and has no waiting in it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import US, Column, Part, Row, format_seconds, get, make_record
from apps.records import Record
from collectives import Communicator
from collectives.progress.thread import shared
from mpicomp.cli.timing import turns

ALONE, PLAIN, DDP = "alone", "alone, on the CPU", "DDP on the CPU, hook of an all-reduce"
METHODS = {
    "Marsit": mpicomp.Marsit(full_precision_every=None),
    "Relay(4)": mpicomp.Relay(levels=4),
    "Relay(16)": mpicomp.Relay(levels=16),
}
SHAPES = ((256, 192), (256,), (192, 256), (192,), (256, 256), (256,), (360, 256), (256,), (256, 3))
"""Tensors of a bucket, hardly less than 1 MiB: as in a block of a transformer, larger ones alternate with biases."""
UNCOUNTED = ("/empty_gpu.py", "/progress/thread.py", "/threading.py")
MOST_US, MOST_MS = 60.0, 1.0


def measure(buckets: int, repeats: int) -> Record | None:
    """Time steps in turn; None where PyTorch finds a GPU, or MPI lacks support of threads."""
    import torch

    from apps.performance.empty_gpu import empty_gpu

    if torch.cuda.is_available():
        print("PyTorch finds a GPU, which the stand-in would replace: not measured", file=sys.stderr)
        return None
    torch.set_num_threads(1)
    rows: list[Row] = []
    with ExitStack() as stack:
        comm = stack.enter_context(Communicator())
        if comm.calls.lacks_thread_support or comm.size > 1:
            print(f"{comm.here}: this takes one rank, and MPI_THREAD_MULTIPLE: not measured", file=sys.stderr)
            return None
        counts = stack.enter_context(empty_gpu())
        plain = _step(buckets, None, None, "cpu")
        steps = {ALONE: _step(buckets, None, None), PLAIN: plain, DDP: _ddp_step(buckets, stack)}
        steps |= {name: _step(buckets, method, comm) for name, method in METHODS.items()}
        seconds, counted = _time_steps(steps, repeats, counts)
        calls = {name: calls_of(step) for name, step in steps.items()}
        for name, found in seconds.items():
            alone = PLAIN if name in (PLAIN, DDP) else ALONE
            over = found - np.median(seconds[alone])
            per_bucket = {one: counted[name][one] / buckets for one in ("launches", "copies", "events")}
            rows.append({"side": name, "step": summary(found), "over": summary(over), **per_bucket,
                         "bucket_s": float(np.median(over)) / buckets,
                         "calls": (calls[name] - calls[alone]) / buckets})  # fmt: skip
    return make_record(rows, buckets=buckets, tensors=buckets * len(SHAPES), repeats=repeats)


def _time_steps(
    steps: dict[str, Callable[[], None]], repeats: int, counts: Counter[str]
) -> tuple[dict[str, Any], dict[str, Counter[str]]]:
    """Return the processor seconds of each step, and the launches, copies and events of the last one."""
    for step in steps.values():
        for _ in range(10):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    counted = {}
    gc.collect()
    gc.disable()  # a collection takes as long as several steps, and comes in whichever step is under way
    for name in turns(dict.fromkeys(steps, repeats)):
        counts.clear()
        start = time.process_time()
        steps[name]()
        taken[name].append(time.process_time() - start)
        counted[name] = counts.copy()
    gc.enable()
    return {name: np.array(found) for name, found in taken.items()}, counted


def calls_of(step: Callable[[], None]) -> int:
    """Return how many functions of Python a step calls in both threads, those of waiting and of the stand-in left out.

    Other load on the machine, which lengthens all times, does not change it.
    """
    calls = [0]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[0] += event == "call" and not frame.f_code.co_filename.endswith(UNCOUNTED)

    thread = shared()
    for profile, work in ((count, step), (None, lambda: None)):
        thread.submit(partial(sys.setprofile, profile))
        thread.flush()
        sys.setprofile(profile)
        work()
    return calls[0]


def _model(buckets: int, device: str = "meta") -> Any:
    """Return a model with the tensors of so many buckets, whose backward brings their gradients one after the other."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = SHAPES if device == "meta" else ((8,),) * len(SHAPES)  # hardly anything to compute
            tensors = [torch.zeros(shape, device=device) for _ in range(buckets) for shape in shapes]
            self.tensors = torch.nn.ParameterList(map(torch.nn.Parameter, tensors))

        def forward(self) -> Any:
            return torch.cat([one.reshape(-1) for one in self.tensors]).sum()

    return Model()


def _step(buckets: int, method: Any, comm: Communicator | None, device: str = "meta") -> Callable[[], None]:
    import torch

    from mpicomp.torch import DistributedOptimizer

    model = _model(buckets, device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if comm is not None:
        optimizer = DistributedOptimizer(
            optimizer, method, comm, model.named_parameters(), "gradients", bucket_mb=1, overlap=True
        )

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model())
        optimizer.step()
        assert comm is None or len(optimizer.reducers) == buckets  # type: ignore[attr-defined]

    return step


def _ddp_step(buckets: int, stack: ExitStack) -> Callable[[], None]:
    """Return the step of PyTorch's own DDP with a hook like its own, over a process group that sends nothing."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def average(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        # as `allreduce_hook` of PyTorch; a future of this process group has no value
        tensor = bucket.buffer().div_(1)
        brought.add(bucket.index())
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: tensor)

    brought: set[int] = set()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    inner, cap_mb = _model(buckets, "cpu"), len(SHAPES) * 32 / 2**20
    model = DistributedDataParallel(inner, bucket_cap_mb=cap_mb, init_sync=False, gradient_as_bucket_view=True)
    model.register_comm_hook(None, lambda state, bucket: average(bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model())
        optimizer.step()
        assert len(brought) == buckets or not optimizer.state

    return step


def _per_bucket(key: str) -> Column:
    return f"{key} a bucket", get(key, ".2f")


COLUMNS: Sequence[Column] = (
    ("step", get("side")),
    ("processor, median, µs", lambda row: format_seconds(row["step"]["median_s"], US)),
    ("over alone, µs", lambda row: format_seconds(row["over"]["median_s"], US)),
    ("a bucket, µs", lambda row: format_seconds(row["bucket_s"], US)),
    ("calls in Python a bucket", get("calls", ".0f")),
    *map(_per_bucket, ("launches", "copies", "events")),
    ("target", lambda row: f"≤ {MOST_MS} ms, {MOST_US:g} µs a bucket" if row["side"] in METHODS else ""),
)
PART = Part(
    "host_time",
    "Host's time of a training step with overlap, where the GPU's work is empty.",
    measure,
    COLUMNS,
    quick={"buckets": 2, "repeats": 2},
    full={"buckets": 16, "repeats": 300},
    ranks=(1,),
)

main = PART.main

if __name__ == "__main__":
    sys.exit(main())
