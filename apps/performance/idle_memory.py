"""Measure the speed of memory that nothing has touched for a while, and of memory that processors share.

The host of a virtual machine may take back memory that is not used. The guest sees no page fault when the memory comes
back; its first read only takes longer.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apps.performance.part import MS, Part, Row, get, in_unit, make_record
from apps.records import Record

PAUSES_S, VECTORS = (0.0, 5.0, 30.0, 60.0, 120.0), 3
NBYTES = 200_000_000
SCALINGS, BETWEEN_S = 10, 3.0
_SCALING_ELEMENTS, _SCALING_TURNS, _SCALING_S = 1 << 24, 5, 0.05


def measure(nbytes: int, pauses_s: Sequence[float], scalings: int, between_s: float) -> Record:
    """Read vectors after a pause. Each pause has three of its own; all vectors, 3 GB, are idle at the same time."""
    scaling = []
    for turn in range(scalings):
        scaling.append(memory_scaling())
        time.sleep(between_s if turn + 1 < scalings else 0)
    idle = {pause_s: [np.ones(nbytes // 4, np.float32) for _ in range(VECTORS)] for pause_s in pauses_s}
    touched = time.monotonic()
    for vector in itertools.chain(*idle.values()):
        vector.max()
    rows: list[Row] = []
    for pause_s, mine in sorted(idle.items()):
        time.sleep(max(0.0, touched + pause_s - time.monotonic()))
        reads = [(_read_s(vector), _read_s(vector)) for vector in mine]
        first, again = np.median(reads, axis=0).tolist()
        rows.append({"pause_s": pause_s, "first_s": first, "again_s": again})
    return {**make_record(rows, bytes=nbytes, vectors=VECTORS), "scaling": scaling}


def memory_scaling() -> float:
    """Return the speed at which all processors read memory at once, relative to one; takes half a second."""
    # Processors that share a way to memory reach little more together than one alone. Which ones a virtual machine has
    # can change while it runs.
    vectors = [np.ones(_SCALING_ELEMENTS, np.float32) for _ in range(len(os.sched_getaffinity(0)))]
    reached = [(passes(vectors[:1]), passes(vectors)) for _ in range(_SCALING_TURNS)]
    return float(np.median([together / alone for alone, together in reached]))


def passes(vectors: list[NDArray[np.float32]]) -> float:
    """Return the passes per second of threads over their vectors, one each."""
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


def _note(record: Record) -> str:
    found = record["scaling"]
    return (
        f"\n\nAll processors at once read memory {np.median(found):.2f} times as fast as one, "
        f"{min(found):.2f} to {max(found):.2f} in {len(found)} tries."
    )


COLUMNS = (
    ("seconds idle", get("pause_s", "g")),
    ("read then, ms of processor time", in_unit("first_s", MS)),
    ("read once more, ms", in_unit("again_s", MS)),
    ("ratio", lambda row: f"{row['first_s'] / row['again_s']:.1f}"),
)
PART = Part(
    "idle_memory",
    "Speed of idle memory, and of memory that is shared.",
    measure,
    COLUMNS,
    quick={"nbytes": 20_000_000, "pauses_s": (0.0, 0.2), "scalings": 1, "between_s": 0.0},
    full={"nbytes": NBYTES, "pauses_s": PAUSES_S, "scalings": SCALINGS, "between_s": BETWEEN_S},
    note=_note,
)

if __name__ == "__main__":
    sys.exit(PART.main())
