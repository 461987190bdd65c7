"""Ranks on a Cartesian grid, with a communicator along each axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Generic, Self, TypeVar

from collectives.closing import Closable
from collectives.consistency.call_check import fingerprint
from collectives.group import Group

Line = TypeVar("Line", bound=Closable)


class Grid(Generic[Line]):
    """Where each rank is, as `Communicator.grid` numbers them, and who it shares a line with.

    Attributes
    ----------
    shape : dict of int
        Ranks along each axis, by its name.
    coordinates : dict of int
        This rank's place.
    """

    def __init__(self, shape: Mapping[str, int], rank: int, along: Mapping[str, Line]) -> None:
        self.shape, self.coordinates = dict(shape), coordinates_of(shape, rank)
        self._along = dict(along)

    def along(self, axis: str) -> Line:
        """The ranks that differ from this one in their place on this axis alone, in the order of these places."""
        return self._along[axis]

    def close(self) -> None:
        """Close all axes' communicators; collective."""
        for comm in self._along.values():
            comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for comm in self._along.values():
            comm.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        places = ", ".join(f"{axis}={place} of {self.shape[axis]}" for axis, place in self.coordinates.items())
        return f"Grid({places})"


def arranged(group: Group, shape: Mapping[str, int], split: Callable[[int, int], Line | None]) -> Grid[Line]:
    """See `Communicator.grid`; `split` makes the communicator of the ranks of a colour, numbered by a key."""
    text = f"grid({', '.join(f'{axis}={length}' for axis, length in shape.items())})"
    try:
        require_shape(shape, group.size)
    except ValueError as error:
        group.reject(ValueError(f"{group.here}: {error}"), text)
    group.agree(fingerprint(text), lambda: text)
    along: dict[str, Line] = {}
    stride = group.size
    for axis, length in shape.items():
        stride //= length
        place = group.rank // stride % length
        line = split(group.rank - place * stride, place)
        assert line is not None  # as every rank gives a colour
        along[axis] = line
    return Grid(shape, group.rank, along)


def coordinates_of(shape: Mapping[str, int], rank: int) -> dict[str, int]:
    """A rank's place on a grid: along the last axis the ranks are neighbours."""
    places = {}
    for axis, length in reversed(list(shape.items())):
        rank, places[axis] = divmod(rank, length)
    return {axis: places[axis] for axis in shape}


def require_shape(shape: Mapping[str, int], ranks: int) -> None:
    """Raise ValueError unless this is a grid of so many ranks."""
    text = " x ".join(f"{axis}={length}" for axis, length in shape.items())
    if not shape or any(not isinstance(length, int) or length < 1 for length in shape.values()):
        raise ValueError(
            f"each axis of a grid needs a positive number of ranks, as in grid(replica=2, stage=4): {text}"
        )
    if math.prod(shape.values()) != ranks:
        raise ValueError(
            f"a grid of {text} has {math.prod(shape.values())} ranks, and there are {ranks}: start as many ranks, or "
            "change the grid"
        )
