"""Text as characters: the source of Python's standard library, which every machine has, or any file."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
OTHER = SYMBOLS.index("?")
"""Stands for all characters that are not among `SYMBOLS`."""
HELD_OUT_EVERY = 10

Tokens = NDArray[np.uint8]
Sequences = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Sequences of characters, each with one more than the model reads, so that it has a last target."""

    name: str  # of the source
    digest: str  # of its characters
    training: Sequences  # int64[sequences, context + 1], as is validation
    validation: Sequences


def load(path: Path | None, characters: int, context: int, skip: int = 0) -> Corpus:
    """Read characters of a file, or of the standard library, behind the first `skip`, and cut them into sequences."""
    end = skip + characters
    text = (_standard_library(end) if path is None else path.read_text(errors="replace")[:end])[skip:]
    name = "Python's standard library" if path is None else path.name
    tokens = encode(text)
    count = (tokens.size - 1) // context
    if count < HELD_OUT_EVERY:
        raise ValueError(
            f"{name} has {tokens.size} characters, which are {max(count, 0)} sequences of {context}: take a text of "
            f"{HELD_OUT_EVERY * context + 1} or more"
        )
    places = np.arange(count)[:, None] * context + np.arange(context + 1)
    sequences = tokens[places].astype(np.int64)
    # for validation
    held_out = np.arange(count) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    return Corpus(name, digest, sequences[~held_out], sequences[held_out])


def encode(text: str) -> Tokens:
    """The place of each character in `SYMBOLS`."""
    table = np.full(0x110000, OTHER, np.uint8)
    table[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS))
    points = np.frombuffer(text.expandtabs(4).encode("utf-32-le", "replace"), np.uint32)
    return table[points]


def _standard_library(characters: int) -> str:
    """The first characters of its modules, in the order of their names."""
    parts, missing = [], characters
    for path in _modules():
        text = path.read_text(encoding="utf-8", errors="replace")[:missing]
        parts.append(text)
        missing -= len(text)
        if not missing:
            break
    return "".join(parts)


def _modules() -> Iterator[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    found = sorted(folder.glob("*.py"))
    if not found:
        raise OSError(f"there is no source of the standard library in {folder}: name a text with --text FILE")
    yield from found
