"""Topologies by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

from collectives.quoting import suggestion
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree

TOPOLOGIES: Mapping[str, Callable[[], Topology]] = MappingProxyType(
    {
        "ring": Ring,
        "segmented-ring": partial(Ring, segments=4),
        "torus": Torus,
        "tree": Tree,
        "double-tree": DoubleTree,
        "halving-doubling": HalvingDoubling,
        "star": Star,
    }
)
"""Maker of each topology with its default options."""

TopologyName: TypeAlias = Literal[
    "auto", "mpi", "ring", "segmented-ring", "torus", "tree", "double-tree", "halving-doubling", "star"
]
"""Names that a communicator accepts, for type checkers and for completion in editors."""


def topology(name_or_instance: str | Topology, also: Iterable[str] = ()) -> Topology:
    """Return the topology of that name with its default options, or the instance itself.

    ``"torus:2x4"`` is a torus of 2 rows and 4 columns.

    Parameters
    ----------
    name_or_instance : str or Topology
    also : iterable of str
        Other names that the caller accepts, for the message.

    Returns
    -------
    Topology

    Raises
    ------
    ValueError
        There is no topology of that name.
    TypeError
        The argument is neither a name nor a topology.

    Examples
    --------
    >>> from collectives import TOPOLOGIES, topology
    >>> topology("torus:2x4")
    Torus(rows=2, cols=4)
    >>> topology("rings")
    Traceback (most recent call last):
        ...
    ValueError: there is no topology 'rings' (did you mean 'ring'?): choose one of ring, ...
    >>> [name for name in TOPOLOGIES if topology(name).plan(rank=0, size=16).n_chunks == 16]
    ['ring', 'torus', 'double-tree', 'halving-doubling']
    """
    if isinstance(name_or_instance, type):
        raise TypeError(f"the topology is a class: write {name_or_instance.__name__}(), with parentheses")
    if not isinstance(name_or_instance, str):
        if not hasattr(name_or_instance, "plan"):
            raise TypeError(f"the topology is {name_or_instance!r}: pass a name, such as 'ring', or an instance")
        return name_or_instance
    shape = re.fullmatch(r"torus:(\d+)x(\d+)", name_or_instance)
    if shape:
        return Torus(int(shape[1]), int(shape[2]))
    try:
        return TOPOLOGIES[name_or_instance]()
    except KeyError:
        names = (*also, *TOPOLOGIES)
        raise ValueError(
            f"there is no topology {name_or_instance!r}{suggestion(name_or_instance, names)}: choose one of "
            f"{', '.join(names)}, torus:ROWSxCOLS"
        ) from None
