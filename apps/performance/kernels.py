"""Time the kernels against NumPy on one core, in turn. Minima count, as the speed of memory varies."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from numba import njit

from apps.performance.durations import summary
from apps.performance.part import MS, Part, against, get, in_unit, make_record, vectors
from apps.records import Record
from collectives.annotations import FloatArray
from collectives.arrays.elements import aligned_empty
from collectives.group.group import SHARED_PIECE_BYTES
from mpicomp.cli.timing import alternate
from mpicomp.codecs import Levels, Sign
from mpicomp.codecs.level_buckets import MAGNITUDES
from mpicomp.kernels.cpu.lanes import fold
from mpicomp.kernels.cpu.sign import encode, pack, unpack
from mpicomp.kernels.cpu.simd import LANES, fence, load, splat, stream
from mpicomp.kernels.streams import BLOCK, GROUP, Stream, source

TRIAD = "triad: two vectors read, two written"
RATIOS = (
    # call, its reference, target
    ("pack", "x.sum()", "≤ 0.75"),
    ("unpack", "x.fill()", "≤ 0.6"),
    ("merge, p = 1/2", "pack", "≤ 0.5"),
    ("merge, p = 3/4", "pack", "≤ 0.5"),
    ("merge, p = 2/3", "pack", "≤ 0.5"),
    ('residual "own" + pack', "np.add(c, g, out=c)", "≤ 1.1"),
    ('residual "paper" + pack', "np.add(c, g, out=c)", "≤ 1.1"),
    *((f"Relay's hop and result, {count} levels", TRIAD, "≤ 1.43") for count in MAGNITUDES),
    ("read alone", "x.sum()", "bound"),
    ("streaming stores alone", "x.fill()", "bound"),
)


@njit(nogil=True)
def read_only(x):  # type: ignore[no-untyped-def]
    """Read a vector in two halves at once and do next to nothing with it."""
    near, far = splat(x.dtype.type(0)), splat(x.dtype.type(0))
    half = x.size // (2 * LANES) * LANES
    for i in range(0, half, LANES):
        near = near + load(x, i)
        far = far + load(x, i + half)
    return fold(near + far)


@njit(nogil=True)
def stream_only(out, value):  # type: ignore[no-untyped-def]
    """Fill a vector past the caches; it begins at a multiple of 32 bytes."""
    filling = splat(value)
    for i in range(0, out.size // LANES * LANES, LANES):
        stream(out, i, filling)
    fence()


@njit(nogil=True)
def triad(x, y, out, other):  # type: ignore[no-untyped-def]
    """Read two vectors and write two, past the caches: the passes of a hop of Relay and of its result."""
    for i in range(0, out.size // LANES * LANES, LANES):
        total = load(x, i) + load(y, i)
        stream(out, i, total)
        stream(other, i, total)
    fence()


def relay_calls(n: int, x: FloatArray, out: FloatArray) -> dict[str, Callable[[], object]]:
    """Return a hop of Relay and the decoding of its result, for each number of levels, and the same passes alone."""
    residual, left = aligned_empty(n, np.float32), aligned_empty(n, np.float32)
    residual[:] = left[:] = 0

    def call(codec: Levels) -> Callable[[], object]:
        buckets = codec.buckets(n)
        incoming, payload = (aligned_empty(buckets.nbytes, np.uint8) for _ in range(2))
        codec.relay(buckets, left, incoming, (x, residual))

        def hop() -> None:
            codec.relay(buckets, left, payload, (x, residual), incoming, streaming=True)
            codec.spread(buckets, payload, 4, 0, out)

        return hop

    made = {f"Relay's hop and result, {count} levels": call(Levels(count)) for count in MAGNITUDES}
    return {TRIAD: lambda: triad(x, residual, out, left), **made}


def calls(n: int) -> dict[str, Callable[[], object]]:
    """Return the timed calls, on vectors of `n` elements."""
    random = np.random.default_rng(1)
    x, out = vectors(n)
    residual, positions = np.zeros(n, np.float32), out.view(np.uint32)
    bits = random.integers(0, 2**64, -(-n // 64), np.uint64)
    others = random.integers(0, 2**64, bits.size, np.uint64)
    sums = np.zeros(-(-n // BLOCK))
    zero, one = np.float32(0), np.float32(1)
    tiny = np.nextafter(zero, one)
    positive, negative = np.array([1.5, -1.5], np.float32).view(np.uint32)
    # As the library does it, piece by piece: random words and the bits they mix then meet in a cache.
    piece = 8 * SHARED_PIECE_BYTES // GROUP * GROUP
    words, sign = np.empty(-(-min(piece, n) // GROUP) * 8, np.uint64), Sign().bind("cpu", Stream(0, 0, "merge"))

    def merge(incoming_weight: int, held_weight: int) -> None:
        for start in range(0, n, piece):
            held = bits[start // 64 : -(-min(start + piece, n) // 64)]
            drawn = words[: -(-held.size // 8) * 8]
            sign.draw(start, 1, source(0), (incoming_weight, held_weight), drawn)
            sign.merge(drawn, others[start // 64 : start // 64 + held.size], held)

    return {
        "x.sum()": x.sum,
        "pack": lambda: pack(x, bits, True, zero, tiny),
        "x.fill()": lambda: out.fill(1.5),
        "unpack": lambda: unpack(bits, positive, negative, True, positions),
        "merge, p = 1/2": lambda: merge(1, 1),
        "merge, p = 3/4": lambda: merge(3, 1),
        "merge, p = 2/3": lambda: merge(2, 1),
        "np.add(c, g, out=c)": lambda: np.add(residual, x, out=residual),
        'residual "own" + pack': lambda: encode(
            x, None, residual, residual, bits, one, one, None, True, zero, tiny, sums
        ),
        'residual "paper" + pack': lambda: encode(
            x, None, residual, residual, bits, one, one, one, True, zero, tiny, sums
        ),
        **relay_calls(n, x, out),
        "read alone": lambda: read_only(x),
        "streaming stores alone": lambda: stream_only(out, one),
    }


def measure(n: int, repeats: int) -> Record:
    """Time all kernels on vectors of `n` elements."""
    timed_calls = calls(n)  # which hold the vectors until their pages are counted
    timed = {name: summary(seconds) for name, seconds in alternate(timed_calls, repeats).items()}
    return make_record([against("kernel", *ratio, timed) for ratio in RATIOS], n=n, repeats=repeats)


COLUMNS = (
    ("kernel", get("kernel")),
    ("min, ms", in_unit("min_s", MS)),
    ("median, ms", in_unit("median_s", MS)),
    ("against", lambda row: f"`{row['reference']}`" if "(" in row["reference"] else row["reference"]),
    ("its min, ms", in_unit("reference_s", MS)),
    ("ratio of minima", get("ratio", ".2f")),
    ("target", get("target")),
)
PART = Part(
    "kernels",
    "Kernels against NumPy on one core.",
    measure,
    COLUMNS,
    quick={"n": 100_000, "repeats": 5},
    full={"n": 25_000_000, "repeats": 60},
)

if __name__ == "__main__":
    sys.exit(PART.main())
