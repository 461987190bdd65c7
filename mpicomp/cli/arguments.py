"""Values of options, read from text. ValueError names the option and the values that it accepts."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection
from typing import TypeAlias

OptionValue: TypeAlias = bool | int | float | str | None
DTYPES = ("float16", "float32", "float64")
MOST_COUNTS = 1000
_MOST_STEPS = 100_000  # of a range, many of which may round to one size


def choice(option: str, text: str, choices: Collection[str]) -> str:
    """Return a text that must be one of `choices`."""
    if text not in choices:
        from collectives.quoting import suggestion  # the doctor reads options where that is another package

        raise ValueError(f"{option} {text}{suggestion(text, choices)}: choose one of {', '.join(choices)}")
    return text


def integer(option: str, text: str, least: int, most: int | None = None) -> int:
    """Read a whole number of at least `least` and at most `most`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{option} {text}: give a whole number {limits}")
    return value


def number(option: str, text: str, least: float) -> float:
    """Read a finite number of at least `least`."""
    value = _float(text)
    if not least <= value < math.inf:
        raise ValueError(f"{option} {text}: give a number of at least {least:g}")
    return value


def seconds(option: str, text: str) -> float:
    """Read a time above 0; ``"inf"`` is allowed."""
    value = _float(text)
    if not value > 0:
        raise ValueError(f"{option} {text}: give a positive number of seconds")
    return value


def count(text: str) -> int:
    """Read a number of elements such as ``"25e6"``."""
    found = counts(text)
    if len(found) != 1:
        raise ValueError(f"--count {text}: give one number of elements, such as 25e6")
    return found[0]


def counts(text: str) -> tuple[int, ...]:
    """Read numbers of elements: ``"25e6"``, ``"1e3,1e6"`` or ``"min:max:factor"``, where the factor defaults to 2."""
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
        if math.log(high / low) > _MOST_STEPS * math.log(factor):
            raise ValueError(f"--count {text}: these are too many sizes; take a larger factor")
        size = float(low)
        while size <= high and len(found) <= MOST_COUNTS:
            if not found or found[-1] != round(size):
                found.append(round(size))
            size *= factor
    if len(found) > MOST_COUNTS:
        raise ValueError(f"--count {text}: these are more than {MOST_COUNTS} sizes; take a larger factor")
    return tuple(found)


def assignment(text: str) -> tuple[str, OptionValue]:
    """Read an option of a method, such as ``clip=inf``; ValueError if there is no key."""
    key, equals, value = text.partition("=")
    key = key.replace("-", "_")
    if not equals or not key.isidentifier():
        raise ValueError(f"--option {text}: write it as key=value, such as full_precision_every=None")
    # words stay text
    for read in (ast.literal_eval, float):
        try:
            found = read(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as of {[]: 1}, and of deep nesting
            continue
        if found is None or isinstance(found, bool | int | float):
            return key, found
    return key, value


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
    """Read a number; NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
