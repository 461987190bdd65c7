"""Time that the store of messages adds to a step of a pipeline: AQ-SGD in memory and in a file, next to DirectQ.

``mpirun -n 2 python -m apps.performance.pipeline_store``. Two stages send the same bits with each way. A turn is an
epoch, whose first step is not timed. Before each turn everything is on the disk, and the system's cache of the files is
given up: each row of the file is then read from the disk, and what one step writes is written during the next.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

from apps.launch import PROJECT
from apps.performance.part import MS, Part, Row, get, in_unit, make_record
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import Seconds, elapsed, gather, slowest, spin_barrier, turns

DIRECT, MEMORY, FILE = "DirectQ", "AQ-SGD, store in memory", "AQ-SGD, store in a file"
TARGETS = {MEMORY: 1.05, FILE: 1.08}
CONFIDENCE = 0.95
BITS = (4, 8)


def measure(repeats: int, **load: int) -> Record | None:
    """Time epochs of all ways in turn; collective."""
    import torch

    from apps.performance.pipeline_load import Load

    torch.set_num_threads(1)
    with Communicator() as comm, _common_folder(comm) as folder:
        ways = _ways(comm, Load(**load), folder)
        for way in ways.values():
            for _ in range(2):  # first all rows in full, then differences
                way.prepare()
                way.rest()
        mine: dict[str, list[float]] = {name: [] for name in ways}
        read = dict.fromkeys(ways, 0)
        for name in turns(dict.fromkeys(ways, repeats)):
            ways[name].prepare()
            before = _read_bytes()
            mine[name].append(elapsed(ways[name].rest, comm) / ways[name].timed)
            read[name] += _read_bytes() - before
        timed = {name: slowest(np.array(seconds), comm) for name, seconds in mine.items()}
        steps = repeats * ways[FILE].timed
        megabytes = {name: float(gather(comm, np.array([nbytes / steps / 1e6])).max()) for name, nbytes in read.items()}
        for way in ways.values():
            way.stage.close()
        rows = [_row(name, timed, megabytes[name]) for name in ways]
        return None if comm.rank else make_record(rows, ranks=comm.size, bits=list(BITS), repeats=repeats, **load)


class Way:
    """Epochs of one stage, whose first step is not timed; `settle` makes the same state of the disk before each."""

    def __init__(self, stage: Any, load: Any, settle: Callable[[], None]) -> None:
        from apps.performance.pipeline_load import trainer

        self.stage, self.timed = stage, load.batches - 1
        self._step, self._settle = trainer(stage, load, shuffled=True), settle

    def prepare(self) -> None:
        """Make the first step; collective."""
        self._settle()
        spin_barrier(self.stage.comm)
        self._step()

    def rest(self) -> None:
        """All other steps of the epoch; collective."""
        for _ in range(self.timed):
            self._step()


def _ways(comm: Communicator, load: Any, folder: Path) -> dict[str, Way]:
    from apps.performance.pipeline_load import module_and_loss
    from mpicomp.codecs import RowQuantizer
    from mpicomp.pipeline import Deltas, Direct, PipelineStage

    module, loss = module_and_loss(load, comm.rank, comm.size)
    forward, backward = (RowQuantizer(bits) for bits in BITS)
    compressions: Mapping[str, Any] = {
        DIRECT: Direct(forward),
        MEMORY: Deltas(forward, examples=load.epoch),
        FILE: Deltas(forward, examples=load.epoch, folder=folder, run="benchmark"),
    }
    stages = {
        name: PipelineStage(module, comm, load.micro_batches, loss=loss, forward=compression, backward=Direct(backward))
        for name, compression in compressions.items()
    }

    def settle() -> None:
        stages[FILE].state_dict()  # which waits until all is written
        for path in folder.iterdir():
            drop_cache(path)

    return {name: Way(stage, load, settle) for name, stage in stages.items()}


@contextmanager
def _common_folder(comm: Communicator) -> Iterator[Path]:
    """A folder that all ranks know, on the disk that the project is on: a temporary one may be in memory."""
    runs = PROJECT / "runs"
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs, prefix="pipeline-store-") as own:
        yield Path(comm.allgather_object(own)[0])
        comm.barrier()


def drop_cache(path: Path) -> None:
    """Write a file to the disk and have the system drop it from memory."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _read_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _row(name: str, timed: Mapping[str, Seconds], megabytes: float) -> Row:
    ratios = timed[name] / timed[DIRECT]
    return {
        "way": name,
        "median_s": float(np.median(timed[name])),
        "min_s": float(timed[name].min()),
        "ratio": float(np.median(ratios)),
        "bound": most(ratios.tolist()),
        "megabytes": megabytes,
        "times_s": timed[name].tolist(),
    }


def most(values: Sequence[float]) -> float:
    """Return an upper bound, with `CONFIDENCE`, on the median of the distribution that these values are drawn from."""
    n = len(values)
    # order statistic: so many values lie below the median with the probability 1 - CONFIDENCE; the greatest if too few
    below = accumulate(comb(n, k) / 2**n for k in range(n))
    place = next((k for k, part in enumerate(below) if part >= CONFIDENCE), n - 1)
    return sorted(values)[place]


def _judge(row: Row) -> str:
    target = TARGETS.get(row["way"])
    return "" if target is None else f"≤ {target}" + ("" if row["bound"] <= target else ", **missed**")


COLUMNS = (
    ("way", get("way")),
    ("a step, ms", in_unit("median_s", MS)),
    ("minimum, ms", in_unit("min_s", MS)),
    (f"over {DIRECT}, median of turns", get("ratio", ".3f")),
    ("with 95 % at most", get("bound", ".3f")),
    ("target", _judge),
    ("MB read from the disk in a step", get("megabytes", ".2f")),
)
PART = Part(
    "pipeline_store",
    "Steps of a pipeline with a store of messages, in memory and in a file, and without.",
    measure,
    COLUMNS,
    quick={"repeats": 2, "context": 8, "width": 16, "blocks": 1, "examples": 2, "micro_batches": 2, "batches": 2},
    full={
        "repeats": 40, "context": 64, "width": 128, "blocks": 2, "examples": 4, "micro_batches": 4, "batches": 3,
    },
    ranks=(2,),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(PART.main())
