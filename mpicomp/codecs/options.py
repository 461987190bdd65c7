"""Checks of the options of codecs and methods, which are frozen dataclasses.

A check is called from `__post_init__`, with the dataclass and the option's name. It raises ValueError with the option,
its range and the value. Otherwise it stores the value as Python's own number or text, so that numbers of NumPy compare
and print the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, Protocol

MOST_ELEMENTS = 1 << 32  # of a chunk or bucket


class Chunked(Protocol):
    """Options with a chunk length."""

    @property
    def chunk(self) -> int | None:
        """Elements of a chunk, or None for the default."""
        ...


class ChunkedOrExact(Chunked, Protocol):
    """Options with a chunk length, and with a choice of the whole vector instead of chunks."""

    @property
    def exact(self) -> bool:
        """True if the whole vector counts as one chunk."""
        ...


class MaskedMomentum(Protocol):
    """Options with a momentum of each rank, cleared where elements are sent with `masking`."""

    @property
    def momentum(self) -> float:
        """Fraction of the momentum that a step keeps; 0: no momentum."""
        ...

    @property
    def masking(self) -> bool:
        """True if sent elements lose their momentum."""
        ...


def require(holds: bool, name: str, wanted: str, value: object) -> None:
    """Raise ValueError unless `holds`; `wanted` describes the values that are accepted."""
    if not holds:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def whole(value: object, least: int | None = None, most: int | None = None) -> bool:
    """Return whether a value is an integer from `least` to `most`; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return (least is None or least <= int(value)) and (most is None or int(value) <= most)


def integer(
    options: object, name: str, least: int | None = None, most: int | None = None, *, also: tuple[object, ...] = ()
) -> None:
    """Check that the option is an integer of `least` to `most`, or one of `also`."""
    span = "" if least is None else f" of {least} or more" if most is None else f" of {least} to {_format_limit(most)}"
    value = getattr(options, name)
    if not _is_one(options, name, also):
        require(whole(value, least, most), name, _or(f"an integer{span}", also), value)
        _store(options, name, int(value))


def number(
    options: object, name: str, wanted: str, holds: Callable[[float], bool], *, also: tuple[object, ...] = ()
) -> None:
    """Check that the option is a number for which `holds` is true, or one of `also`; `wanted` describes it in words."""
    value = getattr(options, name)
    if _is_one(options, name, also):
        return
    # `holds` is false for NaN
    found = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            found = float(value)
    require(holds(found), name, _or(wanted, also), value)
    _store(options, name, found)


def choice(options: object, name: str, choices: tuple[object, ...]) -> None:
    """Check that the option is one of `choices`."""
    require(_is_one(options, name, choices), name, " or ".join(map(repr, choices)), getattr(options, name))


def flag(options: object, name: str) -> None:
    """Check that the option is True or False."""
    value = getattr(options, name)
    require(isinstance(value, bool), name, "True or False", value)


def chunk(options: Chunked, rates: Sequence[int]) -> None:
    """Check that the option `chunk` is None or a multiple of every rate, at most 2^32."""
    value, least = options.chunk, math.lcm(*rates)
    if value is not None:
        fits = whole(value, 1, MOST_ELEMENTS) and int(value) % least == 0
        require(fits, "chunk", f"None or a multiple of {least}, up to 2^32", value)
        _store(options, "chunk", int(value))


def chunk_or_exact(options: ChunkedOrExact, rates: Sequence[int]) -> None:
    """Check the option `chunk`, which must be None if the option `exact` is True."""
    flag(options, "exact")
    if options.exact and options.chunk is not None:
        raise ValueError(f"chunk must be None with exact=True, which has no chunks, not {options.chunk!r}")
    chunk(options, rates)


def masked_momentum(options: MaskedMomentum) -> None:
    """Check the options `momentum` and `masking`."""
    number(options, "momentum", "at least 0 and below 1", lambda momentum: 0 <= momentum < 1)
    flag(options, "masking")
    if options.masking and not options.momentum:
        raise ValueError("masking=True needs a momentum, whose parts that were sent it clears: pass momentum=0.9")


def adopt(options: object, checked: Any) -> None:
    """Store the checked values of another dataclass, which was made of options of the same names."""
    for field in fields(checked):
        if hasattr(options, field.name):
            _store(options, field.name, getattr(checked, field.name))


def _is_one(options: object, name: str, choices: tuple[object, ...]) -> bool:
    value = getattr(options, name)
    for one in choices:
        if isinstance(value, type(one)) and value == one:
            _store(options, name, one)
            return True
    return False


def _or(wanted: str, also: tuple[object, ...]) -> str:
    return ", or ".join([wanted, *map(repr, also)])


def _format_limit(most: int) -> str:
    return "2^32" if most == MOST_ELEMENTS else str(most)


def _store(options: object, name: str, value: object) -> None:
    object.__setattr__(options, name, value)
