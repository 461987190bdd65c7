"""Checks of the options of codecs and methods, which are frozen dataclasses: each names option, range and value.

A check takes the dataclass and the option's name, from `__post_init__`. What passes is stored as Python's own number or
text, so that NumPy's mean the same and look the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

MOST_ELEMENTS = 1 << 32  # of a chunk or bucket


def require(holds: bool, name: str, wanted: str, value: Any) -> None:
    """Raise ValueError unless it holds; `wanted` says what would do."""
    if not holds:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def whole(value: Any, least: int | None = None, most: int | None = None) -> bool:
    """Whether it is an integer from `least` to `most`; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return (least is None or least <= int(value)) and (most is None or int(value) <= most)


def integer(
    options: Any, name: str, least: int | None = None, most: int | None = None, *, also: tuple[Any, ...] = ()
) -> None:
    """Check an integer of `least` to `most`.

    Raises
    ------
    ValueError
        It is none, and none of `also`.
    """
    span = "" if least is None else f" of {least} or more" if most is None else f" of {least} to {_shown(most)}"
    value = getattr(options, name)
    if not _is_one(options, name, also):
        require(whole(value, least, most), name, _or(f"an integer{span}", also), value)
        _store(options, name, int(value))


def number(options: Any, name: str, wanted: str, holds: Callable[[float], bool], *, also: tuple[Any, ...] = ()) -> None:
    """Check a number that `holds` is true of, as `wanted` says in words; it is false of NaN.

    Raises
    ------
    ValueError
        It is none, and none of `also`.
    """
    value = getattr(options, name)
    if _is_one(options, name, also):
        return
    fits = isinstance(value, Real) and not isinstance(value, bool)
    try:
        found = float(value) if fits else math.nan
    except OverflowError:
        found = math.nan
    require(holds(found), name, _or(wanted, also), value)
    _store(options, name, found)


def choice(options: Any, name: str, choices: tuple[Any, ...]) -> None:
    """Raise ValueError unless the option is one of `choices`."""
    require(_is_one(options, name, choices), name, " or ".join(map(repr, choices)), getattr(options, name))


def flag(options: Any, name: str) -> None:
    """Raise ValueError unless the option is True or False."""
    value = getattr(options, name)
    require(isinstance(value, bool), name, "True or False", value)


def chunk(options: Any, rates: Sequence[int]) -> None:
    """Raise ValueError unless the option `chunk` is None or a multiple of every rate, of 2^32 at most."""
    value, least = options.chunk, math.lcm(*rates)
    if value is not None:
        fits = whole(value, 1, MOST_ELEMENTS) and int(value) % least == 0
        require(fits, "chunk", f"None or a multiple of {least}, up to 2^32", value)
        _store(options, "chunk", int(value))


def chunk_or_exact(options: Any, rates: Sequence[int]) -> None:
    """`chunk`, which must be None where the option `exact` is True."""
    flag(options, "exact")
    if options.exact and options.chunk is not None:
        raise ValueError(f"chunk must be None with exact=True, which knows no chunks, not {options.chunk!r}")
    chunk(options, rates)


def adopt(options: Any, checked: Any) -> None:
    """Store what a dataclass that was made of options of the same names has checked."""
    for field in fields(checked):
        if hasattr(options, field.name):
            _store(options, field.name, getattr(checked, field.name))


def _is_one(options: Any, name: str, choices: tuple[Any, ...]) -> bool:
    value = getattr(options, name)
    for one in choices:
        if isinstance(value, type(one)) and value == one:
            _store(options, name, one)
            return True
    return False


def _or(wanted: str, also: tuple[Any, ...]) -> str:
    return ", or ".join([wanted, *map(repr, also)])


def _shown(most: int) -> str:
    return "2^32" if most == MOST_ELEMENTS else str(most)


def _store(options: Any, name: str, value: Any) -> None:
    object.__setattr__(options, name, value)
