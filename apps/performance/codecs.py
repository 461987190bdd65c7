"""Time the codecs against NumPy on one core, in turn. Minima count, as the speed of memory varies.

``python -m apps.performance.codecs``. Vectors go through the codecs in the pieces in which methods send them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from apps.performance.durations import summary
from apps.performance.part import MS, Part, against, get, in_unit, make_record, vectors
from apps.records import Record
from collectives.execution.program import pieces
from collectives.group.group import SHARED_PIECE_BYTES
from mpicomp.cli.timing import alternate
from mpicomp.codecs import Clipping, Codec, Counts, Draw, OneBit, Quantizer, TopK, TwoMeans
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.piece_lengths import piece_elements

CODECS: dict[str, Codec] = {
    "quantize, s = 4": Quantizer(512, 4, "linf"),
    "quantize, s = 4, l2, entropy-coded": Quantizer(4096, 4, "l2", "entropy"),
    "one bit, one scale": OneBit(1 << 15),
    "one bit, two means": TwoMeans(512),
    "clip to 16 bits": Clipping(16),
    "top-k at 100x": TopK(100),
    "top-k at 100x, 10 of 1000": TopK(100, 1000),
}
MERGES = ((1, 1), (3, 1), (7, 1), (4, 4))
ABS_SUM, ADD = "np.abs(x).sum()", "np.add(x, y, out=y)"
TARGETS = {"encode quantize, s = 4": "≤ 3", "encode top-k at 100x": "≤ 1.5"}


def codec_calls(codec: Codec, name: str, n: int, x: Any, out: Any) -> dict[str, Callable[[], object]]:
    """Encoding and decoding of a whole vector."""
    cuts = pieces(range(n), piece_elements(codec, n, SHARED_PIECE_BYTES), codec.alignment)
    payloads = [np.empty(codec.nbytes(len(cut)), np.uint8) for cut in cuts]
    stream = Stream(0, 0, "benchmark")

    def encode() -> None:
        for cut, payload in zip(cuts, payloads, strict=True):
            codec.encode(x[cut.start : cut.stop], payload, draw=Draw(stream, 0, 0, 0, cut.start))

    def decode() -> None:
        for cut, payload in zip(cuts, payloads, strict=True):
            codec.decode(payload, out[cut.start : cut.stop], weight=1)

    encode()
    return {f"encode {name}": encode, f"decode {name}": decode}


def merge_calls(n: int) -> dict[str, Callable[[], object]]:
    """Counts added to counts."""
    codec, random = Counts(), np.random.default_rng(0)
    found: dict[str, Callable[[], object]] = {}
    draw = Draw(Stream(0, 0, "benchmark"), 0, 0)
    for incoming_weight, held_weight in MERGES:
        held = random.integers(0, 256, codec.nbytes(n, incoming_weight + held_weight), np.uint8)
        incoming = random.integers(0, 256, codec.nbytes(n, incoming_weight), np.uint8)
        weights = {"held_weight": held_weight, "incoming_weight": incoming_weight}
        name = f"merge counts of {incoming_weight} into {held_weight}"
        found[name] = partial(codec.merge, held, incoming, n, draw=draw, **weights)
    return found


def measure(n: int, repeats: int) -> Record:
    """Time all codecs on a vector of `n` elements."""
    x, out = vectors(n)
    merges = merge_calls(n)
    calls: dict[str, Callable[[], object]] = {
        ABS_SUM: lambda: np.abs(x).sum(),
        ADD: lambda: np.add(x, out, out=out),
        **merges,
    }
    for name, codec in CODECS.items():
        calls |= codec_calls(codec, name, n, x, out)
    timed = {name: summary(seconds) for name, seconds in alternate(calls, repeats).items()}
    targets = TARGETS | dict.fromkeys(merges, "≤ 1.0")
    rows = [
        against("what", name, ADD if name in merges else ABS_SUM, targets.get(name, ""), timed)
        for name in calls
        if name not in (ABS_SUM, ADD)
    ]
    return make_record(rows, n=n, repeats=repeats)


COLUMNS = (
    ("operation", get("what")),
    ("ms", in_unit("min_s", MS)),
    ("against", get("reference")),
    ("ms", in_unit("reference_s", MS)),
    ("ratio", get("ratio", ".2f")),
    ("target", get("target")),
)
PART = Part(
    "codecs",
    "The codecs on one core.",
    measure,
    COLUMNS,
    quick={"n": 300_000, "repeats": 3},
    full={"n": 25_000_000, "repeats": 15},
)

if __name__ == "__main__":
    sys.exit(PART.main())
