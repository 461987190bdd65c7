"""Cost of averaging in a transformer's training step on a GPU: alone, under DDP, with Marsit and with Relay, in turn.

``mpirun -n 1 python -m apps.performance.gpu_training``, or with more ranks, which take the GPUs of their node in turn.
The model is a small GPT, in bfloat16 by autocast, with AdamW; options set the size. Under `DistributedOptimizer`
Marsit and Relay average gradients, encode them on the GPU and overlap with backward. DistributedDataParallel sums over
NCCL, or over Gloo where ranks share a GPU or NCCL is missing: this is the cost of PyTorch's own hooks.

Computing is the time of forward and backward on the GPU, from CUDA events on the stream that computes: gradients are
encoded meanwhile, and no result is waited for. Its slowdown is the ratio of medians with and without encoding: it
includes kernels that take turns, memory that is shared, and the cost of hooks where the host is slower than the GPU. A
step ends with the optimizer's, by the clock, and includes its waits.

A profile of some steps, by PyTorch's profiler, divides the GPU's time: kernels on streams of the step alone are
computing, copies to the host and back are copies, and everything else is encoding and decoding. ``--trace FILE`` writes
the profile of rank 0 for chrome://tracing. Python's profiler shows where the host is in ``optimizer.step()``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from typing import Any

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.gpu_machine import choose_gpu, parser_of, positive, run_part, software
from apps.performance.gpu_nccl import process_group
from apps.performance.gpu_profile import Activity, record
from apps.performance.part import MS, Part, Row, both, format_seconds, get, in_unit, make_record, table
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import Seconds, alternate, slowest

WHAT = "training steps on GPUs are"
ALONE, DDP, BESIDE, RELAY = "alone", "under DDP", "with Marsit", "with Relay"
METHODS = {BESIDE: mpicomp.Marsit(full_precision_every=None), RELAY: mpicomp.Relay(16)}
AT_MOST = 0.03
COMPUTING, ENCODING, COPYING = "computing", "encoding", "copies"
TOP = 15  # kernels that are shown


class TrainingStep:
    """A model, its optimizer and a batch; calling it makes a step and waits for the GPU."""

    def __init__(self, sizes: dict[str, int], batch: int, device: str, comm: Communicator, side: str) -> None:
        # sizes are those of `apps.pipeline.model.Shape`, batch the examples of a rank; `side` is the way of the
        # averages, `ALONE` for none
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from apps.pipeline.model import Shape, slice_of
        from apps.pipeline.text import SYMBOLS
        from mpicomp.torch import DistributedOptimizer

        shape = Shape(**sizes)
        self._torch, self._kind = torch, torch.device(device).type
        model: torch.nn.Module = slice_of(shape, 0, 1, seed=0)
        self._model = model.to(device)
        self.parameters = sum(one.numel() for one in self._model.parameters())
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        if side == DDP:
            self._model = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        elif side in METHODS:
            self._optimizer = DistributedOptimizer(
                self._optimizer, METHODS[side], comm, self._model.named_parameters(), synchronize="gradients",
                overlap=True,
            )  # fmt: skip
        self.hosted: Profile | None = None
        self._tokens = torch.randint(len(SYMBOLS), (batch, shape.context + 1)).to(device)
        self._marks: list[tuple[Any, Any]] = []

    def __call__(self) -> None:
        """Make a step."""
        from apps.pipeline.model import loss

        torch = self._torch
        event: Any = torch.cuda.Event
        self._optimizer.zero_grad()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        with torch.autocast(self._kind, torch.bfloat16):
            value = loss(self._model(self._tokens[:, :-1]), self._tokens[:, 1:])
        torch.autograd.backward(value)
        end.record()
        with nullcontext() if self.hosted is None else self.hosted:
            self._optimizer.step()
        torch.cuda.synchronize()
        self._marks.append((start, end))

    def computing(self, repeats: int) -> Seconds:
        """float64[repeats] seconds of forward and backward on the GPU, of the last steps."""
        return np.array([1e-3 * start.elapsed_time(end) for start, end in self._marks[-repeats:]])


def measure(batch: int, repeats: int, profiled: int, trace: Path | None = None, **sizes: int) -> Record | None:
    """Time training steps and profile some; collective. None on ranks other than 0, and without GPUs."""
    if sizes["width"] % sizes["heads"]:
        sys.exit(f"error: a width of {sizes['width']} cannot be shared by {sizes['heads']} heads: choose a multiple")
    with Communicator() as timing, Communicator() as comm:
        place = choose_gpu(timing, WHAT)
        if place is None:
            return None
        if comm.calls.lacks_thread_support:
            if timing.rank == 0:
                lack = "MPI lacks MPI_THREAD_MULTIPLE, so that nothing is encoded in backward"
                print(f"{comm.here}: {lack}: {WHAT} not measured", file=sys.stderr, flush=True)
            return None
        first = timing.rank == 0
        with process_group(timing, place):
            sides = {name: TrainingStep(sizes, batch, place.device, comm, name) for name in (ALONE, DDP, BESIDE, RELAY)}
            elapsed = alternate(sides, repeats, comm=timing)
            computing = {name: slowest(side.computing(repeats), timing) for name, side in sides.items()}
            done = {
                name: _profile(side, profiled, trace if first and name == BESIDE else None)
                for name, side in sides.items()
            }
            host = [row for name in METHODS for row in _on_host(name, sides[name], profiled)]
        if not first:
            return None
        streams = {one.stream for one in done[ALONE]}
        parts = {name: in_parts(of, streams, profiled) for name, of in done.items()}
        settings = {**sizes, "batch": batch, "parameters": sides[ALONE].parameters, "ranks": timing.size,
                    "a GPU each": place.alone, "repeats": repeats, "profiled": profiled, **software()}  # fmt: skip
        rows = compare({name: summary(of) for name, of in elapsed.items()},
                        {name: summary(of) for name, of in computing.items()}, parts)  # fmt: skip
        return {**make_record(rows, **settings), "kernels": top_kernels(done[BESIDE], streams, profiled), "host": host}


def _profile(step: TrainingStep, times: int, trace: Path | None) -> list[Activity]:
    """Return the GPU's activities in so many steps."""

    def steps() -> None:
        for _ in range(times):
            step()

    return record(steps, trace)


def _on_host(name: str, step: TrainingStep, times: int) -> list[Row]:
    """Return the functions in which the host spends most of ``optimizer.step()``, by so many steps; collective."""
    step.hosted = Profile()
    for _ in range(times):
        step()
    stats: Any = Stats(step.hosted)
    step.hosted = None
    most = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:TOP]
    return [
        {"side": name, "function": f"{function} ({Path(file).name}:{line})", "calls": calls / times,
         "seconds": seconds / times}
        for (file, line, function), (_, calls, seconds, *_) in most
    ]  # fmt: skip


def part_of(one: Activity, streams: set[int]) -> str:
    """Return the kind of an activity: computing on one of these streams, a copy, or encoding."""
    return COPYING if one.crosses else COMPUTING if one.stream in streams else ENCODING


def in_parts(done: Sequence[Activity], streams: set[int], steps: int) -> dict[str, float]:
    """Seconds of a step on the GPU, by purpose; copies that run at the same time count each."""
    seconds = dict.fromkeys((COMPUTING, ENCODING, COPYING), 0.0)
    for one in done:
        seconds[part_of(one, streams)] += (one.end_s - one.start_s) / steps
    return seconds


def compare(
    steps: dict[str, dict[str, float]], computing: dict[str, dict[str, float]], parts: dict[str, dict[str, float]]
) -> list[Row]:
    """A row for each side: its step, its computing and how much slower that is than alone, and its parts."""
    alone = computing[ALONE]["median_s"]
    return [
        {"side": name, "step": steps[name], "computing": computing[name],
         "slowdown": computing[name]["median_s"] / alone - 1, "parts": parts[name],
         "target": f"≤ {AT_MOST:.0%}" if name in METHODS else ""}
        for name in steps
    ]  # fmt: skip


def top_kernels(done: Sequence[Activity], streams: set[int], steps: int) -> list[Row]:
    """Those of the kernels and copies that took most, with the share of the GPU's time that each has."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in done:
        found[one.name, part_of(one, streams)].append(one.end_s - one.start_s)
    whole = sum(map(sum, found.values()))
    most = sorted(found.items(), key=lambda item: -sum(item[1]))[:TOP]
    return [
        {"kernel": name, "part": part, "calls": len(times) / steps, "seconds": sum(times) / steps,
         "share": sum(times) / whole}
        for (name, part), times in most
    ]  # fmt: skip


def note(record: Record) -> str:
    """The kernels that took most of the GPU's time, and the functions that took most of the host's."""
    host = f"\n\nFunctions of the host in `optimizer.step()`, by step:\n\n{table(FUNCTIONS, record['host'])}"
    if not record["kernels"]:
        return f"\n\nPyTorch's profiler shows nothing that the GPU did: there is no profile.{host}"
    return f"\n\nWhat took most of the GPU's time {BESIDE}, by step:\n\n{table(KERNELS, record['kernels'])}{host}"


def _part(part: str) -> Any:
    return lambda row: format_seconds(row["parts"][part], MS)


def _short(row: Row) -> str:
    name = row["kernel"].replace("|", "\\|")
    return f"`{name if len(name) <= 60 else name[:57] + '...'}`"


KERNELS = (
    ("kernel", _short),
    ("for", get("part")),
    ("calls", get("calls", ".1f")),
    ("ms", in_unit("seconds", MS)),
    ("share", get("share", ".1%")),
)
FUNCTIONS = (
    ("training", get("side")),
    ("function", lambda row: f"`{row['function']}`"),
    ("calls", get("calls", ".1f")),
    ("ms", in_unit("seconds", MS)),
)
COLUMNS = (
    ("training", get("side")),
    ("step, median (min), ms", lambda row: both(row["step"], MS)),
    ("forward and backward, median (min), ms", lambda row: both(row["computing"], MS)),
    ("slower than alone", get("slowdown", "+.1%")),
    ("target", get("target")),
    *((f"{part} on the GPU, ms", _part(part)) for part in (COMPUTING, ENCODING, COPYING)),
)
SIZES = ("layers", "width", "heads", "context", "batch", "repeats")
PART = Part(
    "gpu_training",
    "A transformer's training step on a GPU: alone, under DDP, with Marsit and Relay. --layers, --width, --heads, "
    "--context, --batch, --repeats N; --trace FILE: a profile for chrome://tracing.",
    measure,
    COLUMNS,
    quick={"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 4, "repeats": 3, "profiled": 2},
    full={"layers": 12, "width": 768, "heads": 12, "context": 1024, "batch": 8, "repeats": 50, "profiled": 5},
    note=note,
    ranks=(1, 2),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 0 too where there is no GPU."""
    parser = parser_of(PART)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=positive(int), metavar="N")
    parser.add_argument("--trace", type=Path)
    return run_part(PART, argv, parser)


if __name__ == "__main__":
    sys.exit(main())
