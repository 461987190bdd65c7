"""Mutations of inputs, for machines without atheris and for short tests."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

MOST_BYTES = 1 << 14
_NUMBER = re.compile(rb"\d+")
_NUMBERS = (
    b"0", b"-1", b"1", b"2", b"007", b"255", b"256", b"65535", b"2147483648", b"9223372036854775808", b"99999999999999",
    b"1e308", b"1e999", b"NaN", b"-Infinity", b"0.5", b"null", b"true", b'"x"', b"[]", b"{}",
)  # fmt: skip
_BYTES = (b"\0", b"\x01", b"\x7f", b"\x80", b"\xff", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\n", b'"', b"[", b"{", b",")


def inputs(seeds: Sequence[bytes], n: int, seed: int) -> Iterator[bytes]:
    """Yield the seeds, then mutations of them: `n` inputs in all, the same for the same arguments."""
    draw = random.Random(seed)
    yield from seeds[:n]
    for _ in range(n - len(seeds)):
        yield mutate(draw.choice(seeds), seeds, draw)


def mutate(content: bytes, others: Sequence[bytes], draw: random.Random) -> bytes:
    """Return an input with one to eight random changes."""
    held = bytearray(content)
    for _ in range(1 << draw.randrange(4)):
        _change(held, others, draw)
    return bytes(held[:MOST_BYTES])


def _change(held: bytearray, others: Sequence[bytes], draw: random.Random) -> None:
    at = draw.randrange(len(held) + 1)
    length = min(len(held) - at, 1 << draw.randrange(8))
    match draw.randrange(9):
        case 0 | 1 if at < len(held):
            held[at] ^= 1 << draw.randrange(8)
        case 2 if at < len(held):
            held[at] = draw.randrange(256)
        case 3:
            held[at:at] = draw.choice(_BYTES)
        case 4:
            del held[at : at + length]
        case 5:
            held[at:at] = held[at : at + length] * draw.choice((1, 2, 40))
        case 6:
            other = draw.choice(others)
            start = draw.randrange(len(other) + 1)
            held[at : at + length] = other[start : start + length]
        case 7:
            numbers = list(_NUMBER.finditer(held))
            if numbers:
                one = draw.choice(numbers)
                held[one.start() : one.end()] = draw.choice(_NUMBERS)
        case _:
            held[at : at + length] = draw.randbytes(length)
