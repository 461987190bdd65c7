"""Communicators of some of the ranks: by colour, and along the axes of a Cartesian grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Self

import numpy as np
from mpi4py import MPI

from collectives.annotations import Indices
from collectives.consistency.descriptions import fingerprint
from collectives.consistency.part_ranks import require_ranks
from collectives.errors import RanksLost
from collectives.execution.call import Call, Steps
from collectives.process_end import forget_endings
from collectives.progress.polling import wait
from collectives.recovery.parts import count_ranks
from collectives.states import State

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator
    from collectives.group.group import Group

_MOST = 2**31 - 1


def split(comm: Group, color: int | None, key: int) -> MPI.Comm | None:
    """Return MPI's communicator of the ranks with this colour; None for no colour."""
    name = "split()"
    with comm.refusing(name, TypeError, ValueError):
        chosen = MPI.UNDEFINED if color is None else _validate_integer("color", color, 0)
        place = _validate_integer("key", key, -_MOST)
    mine, everyones = np.array([chosen, place]), np.empty((comm.size, 2), np.int64)
    if comm.recovery is not None and comm.recovery.is_active_here:  # all ranks that are left are here
        wait(comm.mpi_comm.Iallgather(mine, everyones), comm.timeout, lambda: f"{comm.here}: not all ranks {name}")
        return comm.recovery.complete(lambda: _part(comm, mine, everyones))
    call = Call(comm, lambda: name)
    with comm.observe("split"):
        part: MPI.Comm = comm.run(call, _steps(comm, call, mine, everyones))
    return None if color is None else part


def _steps(comm: Group, call: Call, mine: Indices, everyones: Indices) -> Steps:
    yield from comm.check(call, fingerprint(call.name()))  # made here, as the ranks may regroup before this step
    yield from call.turn()
    missing = f"{comm.here}: not all ranks come to split the communicator"
    yield from comm.await_request(call, comm.mpi_comm.Iallgather(mine, everyones), lambda: missing)
    # MPI splits in a call that waits for all ranks: none may wait there for a rank that does not come, such as one that
    # has received damaged colours.
    yield from comm.await_request(call, comm.mpi_comm.Ibarrier(), lambda: missing)
    call.result = _part(comm, mine, everyones)


def _part(comm: Group, mine: Indices, everyones: Indices) -> MPI.Comm:
    """Return the communicator of the ranks with this rank's colour."""
    color, key = mine.tolist()
    part: MPI.Comm = comm.mpi_comm.Split(color, key)
    if color != MPI.UNDEFINED:
        of_color = np.flatnonzero(everyones[:, 0] == color)
        require_ranks(comm.mpi_comm, part, of_color[np.argsort(everyones[of_color, 1], kind="stable")].tolist())
    return part


def abandon(part: Group, reason: str) -> None:
    """Give up a part that not all ranks have; no message is sent."""
    part.ending.end_quietly(State.GIVEN_UP, reason)
    if part.workers is not None:
        part.workers.dismiss()
    forget_endings([part.ending])


def _validate_integer(name: str, value: int, least: int) -> int:
    """Return an argument, which must be an integer from `least` to 2^31 - 1."""
    try:
        number = index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not least <= number <= _MOST:
        raise ValueError(f"{name} must lie in {least} .. {_MOST}, not {number}")
    return number


class Grid:
    """Ranks on a Cartesian grid, with a communicator along each axis. `Communicator.grid` makes it.

    Parameters
    ----------
    shape : dict of int
        Ranks along each axis, by its name.
    rank : int
    along : dict of Communicator

    Attributes
    ----------
    shape : dict of int
        The parameter.
    coordinates : dict of int
        Coordinates of this rank.

    Examples
    --------
    >>> import mpicomp
    >>> def sum_rows(comm):
    ...     grid = comm.grid(row=2, column=2)
    ...     total = grid.along("column").allreduce(comm.rank)  # of the ranks of this row
    ...     grid.close()
    ...     return grid.coordinates, total
    >>> mpicomp.run_local(4, sum_rows)[3]
    ({'row': 1, 'column': 1}, 5)
    """

    def __init__(self, shape: Mapping[str, int], rank: int, along: Mapping[str, Communicator]) -> None:
        self.shape, self.coordinates = dict(shape), coordinates_of(shape, rank)
        self._along = dict(along)

    def along(self, axis: str) -> Communicator:
        """Return the communicator of the ranks that differ from this one on the axis of this name alone, in its order.

        Parameters
        ----------
        axis : str

        Raises
        ------
        KeyError
            The grid has no such axis.
        """
        return self._along[axis]

    def close(self) -> None:
        """Close all axes' communicators; collective."""
        for comm in self._along.values():
            comm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        for comm in self._along.values():
            comm.__exit__(kind, error, *rest)

    def __repr__(self) -> str:
        places = ", ".join(f"{axis}={place} of {self.shape[axis]}" for axis, place in self.coordinates.items())
        return f"Grid({places})"


def grid(comm: Communicator, **shape: int) -> Grid:
    """Arrange the ranks on a Cartesian grid, as in ``comm.grid(replica=2, stage=4)``; collective.

    Parameters
    ----------
    **shape : int
        Ranks along each axis. Ranks that follow each other are neighbours along the last one, so name last the
        axis along which most is sent: launchers fill one node after the other.

    Returns
    -------
    Grid
        With a communicator along each axis, made by `split`; close it, or use it in a ``with`` block.

    Raises
    ------
    ValueError
        The grid does not have as many ranks as there are; on every rank that passes it.
    CollectiveMismatch
        The ranks pass different grids.
    RanksLost
        A rank has died meanwhile; on all survivors, which can make the call again.

    Examples
    --------
    >>> import mpicomp
    >>> def average_replicas(comm):
    ...     with comm.grid(replica=2, stage=2) as grid:
    ...         return grid.along("replica").allreduce(comm.rank, op="mean")
    >>> mpicomp.run_local(4, average_replicas)
    [1.0, 2.0, 1.0, 2.0]
    """
    text = f"grid({', '.join(f'{axis}={length}' for axis, length in shape.items())})"
    with comm.refusing(text, ValueError, where=comm.here):
        require_shape(shape, comm.size)
    size = comm.size
    comm.agree(fingerprint(text), lambda: text)
    if comm.recovery is not None and count_ranks(comm, True) != (size, size):  # equal on all, unlike `comm.size` here
        raise RanksLost(f"{comm.here}: a rank died during {text}; the survivors can make the call again", comm.members)
    along: dict[str, Communicator] = {}
    stride = comm.size
    for axis, length in shape.items():
        stride //= length
        place = comm.rank // stride % length
        try:
            line = comm.split(comm.rank - place * stride, place)
        except RanksLost:
            for part in along.values():
                abandon(part, "a rank died while the ranks made the grid")
            raise
        assert line is not None  # as every rank gives a colour
        along[axis] = line
    return Grid(shape, comm.rank, along)


def coordinates_of(shape: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return a rank's coordinates; along the last axis the ranks are neighbours."""
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
