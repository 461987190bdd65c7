"""Compare the size of entropy-coded quantizer codes with the entropy, and measure the coder's speed, on one core.

Where the package `constriction` is installed, its ANS coder does the same. It is given the message's own frequencies,
which take no part of its message.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.performance.part import Column, Part, Row, get, make_record
from apps.records import Record
from mpicomp.cli.timing import Calls, alternate
from mpicomp.codecs import rans

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
    """Codes of QSGD and ECQ-SGD for normal values: 4 levels to a side, one two-norm for every 4096."""
    random = np.random.default_rng(0)
    buckets = random.standard_normal((-(-n // 4096), 4096), np.float32)
    scaled = 4 * buckets / np.linalg.norm(buckets, axis=1, keepdims=True)
    drawn = np.floor(np.abs(scaled) + random.random(scaled.shape, np.float32))
    return (4 + np.sign(scaled) * drawn).astype(np.uint8).reshape(-1)[:n]


def entropy_of(p: NDArray[np.float64]) -> float:
    """Bits per symbol."""
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def coder_calls(symbols: NDArray[np.uint8], levels: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Calls of each coder, and how many bits per symbol its message has."""
    payload, back = np.empty(rans.most_bytes(symbols.size, levels), np.uint8), np.empty_like(symbols)
    used = rans.encode(symbols, levels, payload)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: rans.encode(symbols, levels, payload),
        "decode": lambda: rans.decode(payload[:used], levels, back),
    }
    sizes = {"bits": 8 * used / symbols.size}
    if importlib.util.find_spec("constriction"):
        more, sizes["constriction's bits"] = constriction_calls(symbols, levels)
        calls |= more
    return calls, sizes


def constriction_calls(symbols: NDArray[np.uint8], levels: int) -> tuple[Calls, float]:
    """The same by constriction, of symbols that are int32 already."""
    stream = importlib.import_module("constriction").stream
    coder_of, wide = stream.stack.AnsCoder, symbols.astype(np.int32)
    model = stream.model.Categorical(np.bincount(symbols, minlength=levels) / symbols.size, perfect=False)

    def encode() -> Any:
        coder = coder_of()
        coder.encode_reverse(wide, model)
        return coder.get_compressed()

    message = encode()
    calls = {
        "constriction encodes": encode,
        "constriction decodes": lambda: coder_of(message).decode(model, symbols.size),
    }
    return calls, 8 * message.nbytes / symbols.size


def measure(n: int, repeats: int) -> Record:
    """Time all sources of `n` symbols."""
    sources = [(f"{levels} levels, {bits} bits", levels, codes(levels, bits, n)) for levels, bits in TARGETS]
    sources.append(("normal values, s = 4, l2 of 4096", 9, gaussian_codes(n)))
    rows: list[Row] = []
    for name, levels, symbols in sources:
        calls, sizes = coder_calls(symbols, levels)
        speeds = {name: n / float(seconds.min()) for name, seconds in alternate(calls, repeats).items()}
        entropy = entropy_of(np.bincount(symbols) / n)
        rows.append({"source": name, "entropy": entropy, **sizes, "symbols_per_s": speeds})
    return make_record(rows, n=n, repeats=repeats)


def _columns(record: Record) -> Sequence[Column]:
    first = record["rows"][0]
    messages = {"bits": "ratio", "constriction's bits": "constriction's ratio"}
    return (
        ("symbols", get("source")),
        ("entropy, bits", get("entropy", ".3f")),
        ("taken, bits", get("bits", ".3f")),
        *((heading, partial(_ratio, key)) for key, heading in messages.items() if key in first),
        *((f"{call}, M/s", partial(_speed, call)) for call in first["symbols_per_s"]),
    )


def _ratio(key: str, row: Row) -> str:
    return f"{row[key] / row['entropy']:.3f}"


def _speed(call: str, row: Row) -> str:
    return f"{row['symbols_per_s'][call] / 1e6:.0f}"


PART = Part(
    "entropy",
    "Entropy coding on one core.",
    measure,
    _columns,
    quick={"n": 100_000, "repeats": 3},
    full={"n": 4_000_000, "repeats": 15},
)

if __name__ == "__main__":
    sys.exit(PART.main())
