"""Time the codecs of rows against a copy of the same float32 rows on one core, in turn. Minima count.

``python -m apps.performance.rows``. The rows are normal values. Each encoding with a message finds the values changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from apps.performance.durations import summary
from apps.performance.part import MS, Part, against, get, in_unit, make_record, vectors
from apps.records import Record
from mpicomp.cli.timing import alternate
from mpicomp.codecs import Draw, FullRows, RowQuantizer, TopRows
from mpicomp.kernels.streams import Stream

COPY = "copy"
QUANTIZERS = {
    **{f"{bits} bit{'s' * (bits > 1)}": RowQuantizer(bits) for bits in (1, 2, 3, 4, 6, 8)},
    **{f"{bits} bits, stochastic": RowQuantizer(bits, "stochastic") for bits in (2, 4, 8)},
}
OTHERS = {"largest fifth, 8 bits": TopRows(0.2), "float16": FullRows("float16")}


def codec_calls(codec: Any, name: str, x: Any, out: Any, draw: Draw) -> dict[str, Callable[[], object]]:
    """Encoding and decoding of all rows."""
    payload = np.empty(codec.nbytes(*x.shape), np.uint8)
    codec.encode(x, payload, draw)
    return {
        f"encode, {name}": lambda: codec.encode(x, payload, draw),
        f"decode, {name}": lambda: codec.decode(payload, out),
    }


def delta_calls(
    codec: RowQuantizer, name: str, values: tuple[Any, Any], message: Any, draw: Draw
) -> dict[str, Callable[[], object]]:
    """The same with a message; the values alternate."""
    payload, turns = np.empty(codec.nbytes(*message.shape), np.uint8), cycle(values)
    codec.encode_delta(next(turns), message, payload, draw)
    return {
        f"encode with message, {name}": lambda: codec.encode_delta(next(turns), message, payload, draw),
        f"decode with message, {name}": lambda: codec.decode_delta(payload, message),
    }


def measure(rows: int, columns: int, repeats: int) -> Record:
    """Time all codecs on rows of float32."""
    x, out = (vector.reshape(rows, columns) for vector in vectors(rows * columns))
    other, message = (vector.reshape(rows, columns) for vector in vectors(rows * columns))
    np.negative(x, out=other)
    draw = Draw(Stream(0, 0, "benchmark"), 0, 0)
    calls: dict[str, Callable[[], object]] = {COPY: lambda: np.copyto(out, x)}
    for name, codec in (QUANTIZERS | OTHERS).items():
        calls |= codec_calls(codec, name, x, out, draw)
    for name in ("2 bits", "4 bits", "4 bits, stochastic"):
        calls |= delta_calls(QUANTIZERS[name], name, (x, other), message, draw)
    timed = {name: summary(seconds) for name, seconds in alternate(calls, repeats).items()}
    table = [against("what", name, COPY, target(name), timed) for name in calls if name != COPY]
    return make_record(table, n=rows * columns, columns=columns, repeats=repeats)


def target(name: str) -> str:
    """Return the project's target for encoding without a message."""
    if not name.startswith("encode, ") or "bit" not in name or "fifth" in name:
        return ""
    return "≤ 4" if "stochastic" in name else "≤ 2"


COLUMNS = (
    ("operation", get("what")),
    ("ms", in_unit("min_s", MS)),
    ("median, ms", in_unit("median_s", MS)),
    ("copy, ms", in_unit("reference_s", MS)),
    ("ratio of minima", get("ratio", ".2f")),
    ("target", get("target")),
)
PART = Part(
    "rows",
    "Codecs of rows against a copy, on one core.",
    measure,
    COLUMNS,
    quick={"rows": 256, "columns": 1024, "repeats": 3},
    full={"rows": 16384, "columns": 1024, "repeats": 60},
)

if __name__ == "__main__":
    sys.exit(PART.main())
