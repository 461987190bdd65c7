"""Speed of memory that nothing has touched for a while, and of memory that processors share.

``python -m apps.performance.idle_memory``.
Below a virtual machine its host may take back what is not used. The guest sees no page fault when it comes again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apps.environment import environment
from apps.performance.record import footer, parser, publish, scaled, table
from apps.records import Record

PAUSES_S, VECTORS = (0.0, 5.0, 30.0, 60.0, 120.0), 3
NBYTES = 200_000_000
SCALINGS, BETWEEN_S = 10, 3.0
_SCALING_ELEMENTS, _SCALING_TURNS, _SCALING_S = 1 << 24, 5, 0.05
MS = 1e-3


def run(nbytes: int, pauses_s: Sequence[float], scalings: int, between_s: float) -> Record:
    """Measure: each pause with three vectors of its own, which rest at the same time; 3 GB altogether."""
    scaling = []
    for turn in range(scalings):
        scaling.append(memory_scaling())
        time.sleep(between_s if turn + 1 < scalings else 0)
    resting = {pause_s: [np.ones(nbytes // 4, np.float32) for _ in range(VECTORS)] for pause_s in pauses_s}
    touched = time.monotonic()
    for vectors in resting.values():
        for vector in vectors:
            vector.max()
    rows = []
    for pause_s, vectors in sorted(resting.items()):
        time.sleep(max(0.0, touched + pause_s - time.monotonic()))
        reads = [(_read_s(vector), _read_s(vector)) for vector in vectors]
        first, again = np.median(reads, axis=0).tolist()
        rows.append({"pause_s": pause_s, "first_s": first, "again_s": again})
    settings = {"bytes": nbytes, "vectors": VECTORS}
    return {"part": "idle-memory", "settings": settings, "environment": environment(), "rows": rows, "scaling": scaling}


def memory_scaling() -> float:
    """How many times as fast as one processor all of them read memory at once; on a quiet machine, in half a second.

    Processors that share a way to memory reach little more together than one alone. Which ones a virtual machine has
    can change while it runs.
    """
    vectors = [np.ones(_SCALING_ELEMENTS, np.float32) for _ in range(len(os.sched_getaffinity(0)))]
    reached = [(passes(vectors[:1]), passes(vectors)) for _ in range(_SCALING_TURNS)]
    return float(np.median([together / alone for alone, together in reached]))


def passes(vectors: list[NDArray[np.float32]]) -> float:
    """How often a second threads read the vectors, one each."""
    done = [0] * len(vectors)
    end = time.perf_counter() + _SCALING_S

    def read(mine: int) -> None:
        while not done[mine] or time.perf_counter() < end:  # once at least, where starting took as long
            vectors[mine].max()  # without Python's lock
            done[mine] += 1

    threads = [threading.Thread(target=read, args=(mine,)) for mine in range(len(vectors))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def _read_s(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    """Processor seconds of reading a vector once."""
    start = time.thread_time()
    vector.max()
    return time.thread_time() - start


def render(record: Record) -> str:
    """Markdown."""
    rows = [
        (f"{row['pause_s']:g}", scaled(row["first_s"], MS), scaled(row["again_s"], MS),
         f"{row['first_s'] / row['again_s']:.1f}")
        for row in record["rows"]
    ]  # fmt: skip
    columns = ("seconds idle", "read then, ms of processor time", "read once more, ms", "ratio")
    found = record["scaling"]
    shared = (
        f"All processors at once read memory {np.median(found):.2f} times as fast as one, "
        f"{min(found):.2f} to {max(found):.2f} in {len(found)} tries."
    )
    return f"{table(columns, rows)}\n\n{shared}{footer(record)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parser("idle_memory", "Speed of idle memory, and of memory that is shared.").parse_args(argv)
    record = run(20_000_000, (0.0, 0.2), 1, 0.0) if options.quick else run(NBYTES, PAUSES_S, SCALINGS, BETWEEN_S)
    publish(record, render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
