"""Decoders of payloads: numbers at the beginning of an input choose the codec's options, elements, type and ranks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from apps.fuzz.guarded import GuardedMemory
from apps.fuzz.target import Target
from collectives.annotations import Bytes
from mpicomp.codecs import (
    Clipping,
    Counts,
    Elias,
    FullRows,
    LevelRows,
    Levels,
    OneBit,
    Quantizer,
    RandomSparsification,
    RowQuantizer,
    SharedSelection,
    Sign,
    SparseLevels,
    StochasticSign,
    Ternary,
    TopK,
    TopRows,
    TwoMeans,
    rans,
)
from mpicomp.codecs.base import AveragingCodec, Draw, VariableCodec
from mpicomp.codecs.full_precision import FullPrecision, Rounded
from mpicomp.kernels.streams import Stream

HEAD = struct.Struct("<BHBB")  # option, elements, ranks, flags
_FITS, _DOUBLE, _ADDS, _LONG = 1, 2, 4, 8  # flags: right length; float64; add or merge; eight times the elements
_MOST_ELEMENTS = 1500
_DRAW = Draw(Stream(0, 0, "fuzz"), step=0, rank=0)


@cache
def _memory() -> tuple[GuardedMemory, GuardedMemory, GuardedMemory]:
    """Return memory of payloads, of decoded values, and of a second payload."""
    return GuardedMemory(1 << 20), GuardedMemory(1 << 20), GuardedMemory(1 << 20)


def _read_head(content: bytes) -> tuple[int, int, int, int, bytes]:
    option, n, ranks, flags = HEAD.unpack(content[: HEAD.size].ljust(HEAD.size, b"\0"))
    return option, n % _MOST_ELEMENTS * (8 if flags & _LONG else 1), ranks, flags, content[HEAD.size :]


def _fitted(payload: bytes, nbytes: int, flags: int) -> Bytes:
    """Copy a payload into guarded memory; with a flag it gets the right length."""
    if flags & _FITS and len(payload) != nbytes:
        payload = (payload * (nbytes // max(1, len(payload)) + 1))[:nbytes].ljust(nbytes, b"\0")
    return _memory()[0].copy(payload)


def _decoder(options: Sequence[Any]) -> Callable[[bytes], None]:
    def run(content: bytes) -> None:
        option, n, ranks, flags, rest = _read_head(content)
        codec = options[option % len(options)]
        weight = 1 + ranks if isinstance(codec, Counts | Elias) else 1
        payload = _fitted(rest, codec.nbytes(n, weight), flags)
        _, values_memory, other_memory = _memory()
        values = values_memory.empty(n, np.float64 if flags & _DOUBLE else np.float32)
        values[:] = 1
        try:
            if flags & _ADDS and isinstance(codec, AveragingCodec):
                codec.add(payload, values)
            elif flags & _ADDS and isinstance(codec, Sign | Counts):
                held_weight = 1 + flags % 7
                whole = held_weight + weight if isinstance(codec, Counts) else 1
                held = other_memory.empty(codec.nbytes(n, whole), np.uint8)
                codec.merge(held, payload, n, held_weight=held_weight, incoming_weight=weight, draw=_DRAW)
                other_memory.check()
            else:
                codec.decode(payload, values, weight=weight)
                if isinstance(codec, VariableCodec):
                    codec.decode_drawn(payload, values, draw=_DRAW)
                    assert codec.count_used(payload, n) <= payload.size
                if isinstance(codec, Quantizer) and codec.coding == "entropy":
                    fixed = other_memory.empty(codec.fixed.nbytes(n), np.uint8)
                    codec.to_fixed(payload, n, fixed)
                    other_memory.check()
        finally:
            values_memory.check()

    return run


def _payloads(options: Sequence[Any]) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        found = []
        for option, codec in enumerate(options):
            for n in (0, 1, 65, 700):
                values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
                payload = np.zeros(codec.nbytes(n), np.uint8)
                codec.encode(values, payload, draw=_DRAW)
                choices = (_FITS, _FITS | _DOUBLE, _FITS | _ADDS, 0)
                found += [HEAD.pack(option, n, 0, flags) + payload.tobytes() for flags in choices]
        return found

    return seeds


def _elias_seeds() -> list[bytes]:
    """Return messages of merged counts in all three codings, too."""
    found = _payloads([Elias()])()
    for n, weight in ((300, 3), (700, 16), (64, 200)):
        counts = np.random.default_rng(n).binomial(weight, 0.5, n).astype(np.uint16)
        planes = np.zeros(Counts().nbytes(n, weight) // 8, np.uint64)
        words = -(-n // 64)
        for plane in range(planes.size // words):
            bits = np.packbits(counts >> plane & 1, bitorder="little")
            planes[plane * words : (plane + 1) * words].view(np.uint8)[: bits.size] = bits
        message = np.zeros(Elias().nbytes(n, weight), np.uint8)
        used = Elias().write(planes, n, weight, message, np.empty(n, np.uint16))
        found.append(HEAD.pack(0, n, weight - 1, 0) + message[:used].tobytes())
    return found


# Rows, winners and entropy codes --------------------------------------------------------------------------------------

_ROWS = (FullRows(), FullRows("float16"), FullRows("bfloat16"))
_ROW_QUANTIZERS = (*(RowQuantizer(bits=bits) for bits in range(1, 9)), RowQuantizer(scale="float32"))
_LEVEL_ROWS = tuple(LevelRows(levels, 64) for levels in (2, 3, 4, 8, 16, 256))
_TOP_ROWS = (TopRows(), TopRows(fraction=1.0), TopRows(fraction=0.01), TopRows(0.3, RowQuantizer(3)))


def _row_decoder(options: Sequence[Any]) -> Callable[[bytes], None]:
    def run(content: bytes) -> None:
        option, columns, rows, flags, rest = _read_head(content)
        codec, columns, rows = options[option % len(options)], columns % 300 + 1, rows % 20
        payload, memory = _fitted(rest, codec.nbytes(rows, columns), flags), _memory()[1]
        values = memory.empty(rows * columns, np.float32).reshape(rows, columns)
        values[:] = 1
        try:
            if flags & _ADDS and hasattr(codec, "decode_delta"):
                codec.decode_delta(payload, values)
            else:
                codec.decode(payload, values)
        finally:
            memory.check()

    return run


def _row_payloads(options: Sequence[Any]) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        found = []
        for option, codec in enumerate(options):
            for rows, columns in ((0, 8), (1, 1), (3, 65)):
                values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
                payload = np.zeros(codec.nbytes(rows, columns), np.uint8)
                codec.encode(values, payload)
                choices = (_FITS, _FITS | _ADDS, 0)
                found += [HEAD.pack(option, columns - 1, rows, flags) + payload.tobytes() for flags in choices]
        return found

    return seeds


def _decode_winners(content: bytes) -> None:
    option, n, ranks, flags, rest = _read_head(content)
    codec = SharedSelection(1 + ranks % 12, 1 + option % 2)
    selection = codec.bind("cpu", Stream(0, 0, "fuzz"))
    winners = selection.reserve(n)
    selection.draw(winners, step=option, first=0)
    stride = codec.nbytes(n) // 8
    payloads = _fitted(rest[: len(rest) // 8 * 8], 8 * stride * codec.ranks, flags).view(np.uint64)
    _, first_memory, second_memory = _memory()
    words = -(-n // 64)
    bits = [first_memory.empty(words, np.uint64), second_memory.empty(words, np.uint64)][: codec.votes]
    selection.decode(payloads, stride, winners, bits)
    first_memory.check()


def _winner_seeds() -> list[bytes]:
    return [
        HEAD.pack(option, n, ranks, flags) + bytes(range(64))
        for option in (0, 1) for n in (0, 65, 1400) for ranks in (0, 2, 7) for flags in (_FITS, _FITS | _LONG)
    ]  # fmt: skip


def _decode_entropy(content: bytes) -> None:
    option, n, _, flags, rest = _read_head(content)
    levels, memory = 2 + option % (rans.MOST_LEVELS - 1), _memory()[1]
    symbols = memory.empty(n, np.uint8)
    try:
        rans.decode(_fitted(rest, len(rest), flags), levels, symbols)
        if n and int(symbols.max()) >= levels:
            raise AssertionError("a symbol is not below its levels")
    finally:
        memory.check()


def _entropy_seeds() -> list[bytes]:
    found = []
    for levels in (2, 3, 9, 255):
        for n, flags in ((0, 0), (1, 0), (900, 0), (1400, _LONG)):
            symbols = np.random.default_rng(n).binomial(levels - 1, 0.05, n * (8 if flags else 1)).astype(np.uint8)
            payload = np.empty(rans.most_bytes(symbols.size, levels), np.uint8)
            used = rans.encode(symbols, levels, payload)
            found.append(HEAD.pack(levels - 2, n, 0, flags) + payload[:used].tobytes())
    return found


_FAMILIES: dict[str, tuple[Any, ...]] = {
    "one-bit": (OneBit(bucket=64), OneBit(bucket=500, scale="l1")),
    "two-means": (TwoMeans(bucket=64), TwoMeans(bucket=1)),
    "quantize": tuple(Quantizer(bucket=512, levels=levels) for levels in (1, 4, 127)),
    "quantize-entropy": tuple(Quantizer(bucket=512, levels=levels, coding="entropy") for levels in (1, 4, 127)),
    "ternary": (Ternary(bucket=100), Ternary(bucket=4096, coding="entropy")),
    "levels": tuple(Levels(levels, bucket=64) for levels in (2, 3, 4, 16, 256)),
    "levels-entropy": tuple(Levels(levels, 64, "entropy") for levels in (3, 8, 16)),
    "clip": tuple(Clipping(bits) for bits in (9, 12, 16, 23, 32)),
    "top-k": (TopK(rate=4), TopK(rate=10, chunk=100), TopK(rate=1), TopK(rate=7, double=True)),
    "random-sparsification": (RandomSparsification(0.1), RandomSparsification(1.0), RandomSparsification(1e-6)),
    "sparse-levels": (SparseLevels(4, 64), SparseLevels(1, 1), SparseLevels(8, 512, bits=32)),
    "sign": (Sign(),),
    "stochastic-sign": (StochasticSign(),),
    "full-precision": tuple(FullPrecision(one) for one in ("float32", "float64", "float16", "bfloat16")),
    "rounded": (Rounded("float16"), Rounded("bfloat16")),
}

TARGETS = [
    *(Target(name, "Codec.decode, add, merge", _payloads(some), _decoder(some)) for name, some in _FAMILIES.items()),
    Target("counts", "Counts.decode, merge", _payloads([Counts()]), _decoder([Counts()])),
    Target("elias", "Elias.decode, read", _elias_seeds, _decoder([Elias()])),
    Target("rans", "rans.decode", _entropy_seeds, _decode_entropy),
    Target("shared-selection", "Selection.decode", _winner_seeds, _decode_winners),
    Target("rows", "FullRows.decode, decode_delta", _row_payloads(_ROWS), _row_decoder(_ROWS)),
    Target("row-quantizer", "RowQuantizer.decode, decode_delta", _row_payloads(_ROW_QUANTIZERS),
           _row_decoder(_ROW_QUANTIZERS)),
    Target("level-rows", "LevelRows.decode, decode_delta", _row_payloads(_LEVEL_ROWS), _row_decoder(_LEVEL_ROWS)),
    Target("top-rows", "TopRows.decode", _row_payloads(_TOP_ROWS), _row_decoder(_TOP_ROWS)),
]  # fmt: skip
