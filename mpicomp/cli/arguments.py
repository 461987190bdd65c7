"""Values of the options that `mpicomp bench` and `mpicomp advise` share, read from text.

Where a text is no such value, ValueError names the option and what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from collectives.quoting import suggestion

DTYPES = ("float16", "float32", "float64")
MOST_COUNTS = 1000


def choice(option: str, text: str, choices: Collection[str]) -> str:
    """One of several words."""
    if text not in choices:
        raise ValueError(f"{option} {text}{suggestion(text, choices)}: choose one of {', '.join(choices)}")
    return text


def integer(option: str, text: str, least: int, most: int | None = None) -> int:
    """A whole number of at least `least`, and of `most` at most."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{option} {text}: give a whole number {limits}")
    return value


def number(option: str, text: str, least: float) -> float:
    """A finite number of at least `least`."""
    value = _float(text)
    if not least <= value < math.inf:
        raise ValueError(f"{option} {text}: give a number of at least {least:g}")
    return value


def seconds(option: str, text: str) -> float:
    """A time above 0; ``"inf"`` is one."""
    value = _float(text)
    if not value > 0:
        raise ValueError(f"{option} {text}: give a positive number of seconds")
    return value


def count(text: str) -> int:
    """Elements from ``"25e6"``."""
    found = counts(text)
    if len(found) != 1:
        raise ValueError(f"--count {text}: give one number of elements, such as 25e6")
    return found[0]


def counts(text: str) -> tuple[int, ...]:
    """Elements from ``"25e6"``, ``"1e3,1e6"`` or ``"min:max:factor"``; the factor is 2 where it is left out."""
    found: list[int] = []
    for part in text.split(","):
        bounds = part.split(":")
        if len(bounds) > 3:
            raise ValueError(f"--count {part}: a range is min:max or min:max:factor")
        low = high = _elements(bounds[0])
        if len(bounds) > 1:
            high = _elements(bounds[1])
        factor = _part(bounds[2], part) if len(bounds) > 2 else 2.0
        if factor <= 1 or high < low:
            raise ValueError(f"--count {part}: in min:max:factor, max is at least min and the factor above 1")
        size = float(low)
        while size <= high and len(found) <= MOST_COUNTS:
            if not found or found[-1] != round(size):
                found.append(round(size))
            size *= factor
    if len(found) > MOST_COUNTS:
        raise ValueError(f"--count {text}: these are more than {MOST_COUNTS} sizes; take a larger factor")
    return tuple(found)


def _elements(text: str) -> int:
    value = _part(text, text)
    if value < 1 or value != int(value):
        raise ValueError(f"--count {text}: give whole numbers of elements from 1 up, such as 1000 or 25e6")
    return int(value)


def _part(text: str, whole: str) -> float:
    value = _float(text)
    if not math.isfinite(value):
        raise ValueError(f"--count {whole}: {text!r} is not a number; write 1000, 25e6, 1e3,1e6 or 1e3:1e6:10")
    return value


def _float(text: str) -> float:
    """The number that a text is; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
