"""Memory that nothing has touched for a while, and processors that share it. ``python -m apps.performance.left_alone``.

Below a virtual machine its host may take back what is not used. The guest sees no page fault when it comes again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from apps.performance.facts import machine_facts, memory_scaling
from apps.performance.record import Record, footer, parser, publish, scaled, table

PAUSES_S, VECTORS = (0.0, 5.0, 30.0, 60.0, 120.0), 3
NBYTES = 200_000_000
SCALINGS, BETWEEN_S = 10, 3.0
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
    return {"part": "left-alone", "settings": settings, "facts": machine_facts(), "rows": rows, "scaling": scaling}


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
    columns = ("seconds left alone", "read then, ms of processor time", "read once more, ms", "ratio")
    found = record["scaling"]
    shared = (
        f"All processors at once read memory {np.median(found):.2f} times as fast as one, "
        f"{min(found):.2f} to {max(found):.2f} in {len(found)} tries."
    )
    return f"{table(columns, rows)}\n\n{shared}{footer(record)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parser("left_alone", "Memory that is left alone, and memory that is shared.").parse_args(argv)
    record = run(20_000_000, (0.0, 0.2), 1, 0.0) if options.quick else run(NBYTES, PAUSES_S, SCALINGS, BETWEEN_S)
    publish(record, render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
