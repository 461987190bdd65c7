"""Entropy coding of quantizer codes on one core: size against the entropy, and speed.

``python -m apps.performance.entropy``.
Where the package `constriction` is installed, its ANS coder does the same, with the message's own frequencies, which it
is handed for nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.environment import environment
from apps.performance.record import footer, parser, publish, table
from apps.records import Record
from mpicomp.cli.timing import Calls, alternate
from mpicomp.codecs import rans as entropy

TARGETS = ((9, 0.1), (9, 0.3), (9, 0.5), (9, 1.0), (9, 2.0), (3, 0.1), (3, 0.5), (255, 2.0))
"""Levels, and bits per symbol."""


def codes(levels: int, bits: float, n: int) -> NDArray[np.uint8]:
    """Independent symbols of that entropy, whose probability falls by one factor with every step from the middle."""
    steps = np.abs(np.arange(levels) - levels // 2)
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        factor = (low + high) / 2
        p = factor**steps / (factor**steps).sum()
        low, high = (factor, high) if entropy_of(p) < bits else (low, factor)
    p = high**steps / (high**steps).sum()
    return np.random.default_rng(0).choice(levels, n, p=p).astype(np.uint8)


def gaussian_codes(n: int) -> NDArray[np.uint8]:
    """What QSGD and ECQ-SGD make of normal values: 4 levels to a side, one two-norm for every 4096."""
    random = np.random.default_rng(0)
    buckets = random.standard_normal((-(-n // 4096), 4096), np.float32)
    scaled = 4 * buckets / np.linalg.norm(buckets, axis=1, keepdims=True)
    drawn = np.floor(np.abs(scaled) + random.random(scaled.shape, np.float32))
    return (4 + np.sign(scaled) * drawn).astype(np.uint8).reshape(-1)[:n]


def entropy_of(p: NDArray[np.float64]) -> float:
    """Bits per symbol."""
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def sides(symbols: NDArray[np.uint8], levels: int) -> tuple[Calls, dict[str, float]]:
    """What is timed, and how many bits per symbol a message has."""
    payload, back = np.empty(entropy.most_bytes(symbols.size, levels), np.uint8), np.empty_like(symbols)
    used = entropy.encode(symbols, levels, payload)
    ways: dict[str, Callable[[], object]] = {
        "encode": lambda: entropy.encode(symbols, levels, payload),
        "decode": lambda: entropy.decode(payload[:used], levels, back),
    }
    sizes = {"bits": 8 * used / symbols.size}
    if importlib.util.find_spec("constriction"):
        more, sizes["constriction's bits"] = foreign_sides(symbols, levels)
        ways |= more
    return ways, sizes


def foreign_sides(symbols: NDArray[np.uint8], levels: int) -> tuple[Calls, float]:
    """The same by constriction, of symbols that are int32 already."""
    stream = importlib.import_module("constriction").stream
    coder_of, wide = stream.stack.AnsCoder, symbols.astype(np.int32)
    model = stream.model.Categorical(np.bincount(symbols, minlength=levels) / symbols.size, perfect=False)

    def encode() -> Any:
        coder = coder_of()
        coder.encode_reverse(wide, model)
        return coder.get_compressed()

    message = encode()
    ways = {
        "constriction encodes": encode,
        "constriction decodes": lambda: coder_of(message).decode(model, symbols.size),
    }
    return ways, 8 * message.nbytes / symbols.size


def run(n: int, repeats: int) -> Record:
    """Measure."""
    sources = [(f"{levels} levels, {bits} bits", levels, codes(levels, bits, n)) for levels, bits in TARGETS]
    sources.append(("normal values, s = 4, l2 of 4096", 9, gaussian_codes(n)))
    rows: list[dict[str, Any]] = []
    for name, levels, symbols in sources:
        ways, sizes = sides(symbols, levels)
        fastest = {side: float(seconds.min()) for side, seconds in alternate(ways, repeats).items()}
        rows.append(
            {
                "source": name,
                "entropy": entropy_of(np.bincount(symbols) / n),
                **sizes,
                "symbols_per_s": {side: n / seconds for side, seconds in fastest.items()},
            }
        )
    return {"part": "entropy", "settings": {"n": n, "repeats": repeats}, "environment": environment(), "rows": rows}


def render(record: Record) -> str:
    """Markdown."""
    first = record["rows"][0]
    speeds, foreign = list(first["symbols_per_s"]), [key for key in first if key == "constriction's bits"]
    rows = [
        (
            row["source"],
            f"{row['entropy']:.3f}",
            f"{row['bits']:.3f}",
            f"{row['bits'] / row['entropy']:.3f}",
            *(f"{row[key] / row['entropy']:.3f}" for key in foreign),
            *(f"{row['symbols_per_s'][side] / 1e6:.0f}" for side in speeds),
        )
        for row in record["rows"]
    ]
    columns = ("symbols", "entropy, bits", "taken, bits", "ratio", *("constriction's ratio" for _ in foreign))
    columns += tuple(f"{side}, M/s" for side in speeds)
    return table(columns, rows) + footer(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parser("entropy", "Entropy coding on one core.").parse_args(argv)
    publish(run(100_000, 3) if options.quick else run(4_000_000, 15), render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
