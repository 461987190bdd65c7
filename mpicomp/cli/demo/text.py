"""Data of the demo, which every machine has: the source text of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpicomp.cli.demo.model import CONTEXT, SYMBOLS, Integers

LENGTH, LEAST = 2_000_000, 200_000
TESTED_PART, N_TESTED = 0.05, 8_192
FIRST = ord(" ") - 1  # number 0 stands for everything below the blank: ends of lines, above all


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as numbers below `SYMBOLS`: those to train with, and those to test with."""

    trained: Integers
    tested: Integers

    def batch(self, random: np.random.Generator, size: int) -> tuple[Integers, Integers]:
        """Draw contexts, int64[size, CONTEXT], and the characters that follow, int64[size]."""
        return _windows(self.trained, random.integers(0, len(self.trained) - CONTEXT, size))

    def tests(self, rank: int, ranks: int) -> tuple[Integers, Integers]:
        """Return a rank's share of `N_TESTED` evenly spread places of the text to test with."""
        starts = np.linspace(0, len(self.tested) - CONTEXT - 1, N_TESTED).astype(np.int64)
        return _windows(self.tested, starts[rank::ranks])


def read_text(folder: Path | None = None) -> Text:
    """Read up to `LENGTH` characters of the standard library's modules, in the order of their names."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    read, length = [], 0
    for path in sorted(folder.glob("*.py")):
        read.append(path.read_bytes())
        length += len(read[-1])
        if length >= LENGTH:
            break
    # as with a zipped Python
    if length < LEAST:
        raise ValueError(
            f"{folder} has {length} bytes of Python source, and {LEAST} are needed: use a Python whose standard "
            "library is not packed, such as that of python.org or of your distribution"
        )
    characters = np.frombuffer(b"".join(read)[:LENGTH], np.uint8).astype(np.int64)
    numbers = np.clip(characters - FIRST, 0, SYMBOLS - 1)
    n_trained = round((1 - TESTED_PART) * len(numbers))
    return Text(numbers[:n_trained], numbers[n_trained:])


def _windows(numbers: Integers, starts: Integers) -> tuple[Integers, Integers]:
    found = numbers[starts[:, np.newaxis] + np.arange(CONTEXT + 1)]
    return found[:, :CONTEXT], found[:, CONTEXT]
