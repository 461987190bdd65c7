"""The topologies by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

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
"""What makes each topology with its default options."""


def topology(name_or_instance: str | Topology) -> Topology:
    """Return the topology of that name with its default options, or the instance itself.

    ``"torus:2x4"`` is a torus of 2 rows and 4 columns.

    Raises
    ------
    ValueError
        There is no topology of that name.
    """
    if not isinstance(name_or_instance, str):
        return name_or_instance
    shape = re.fullmatch(r"torus:(\d+)x(\d+)", name_or_instance)
    if shape:
        return Torus(int(shape[1]), int(shape[2]))
    try:
        return TOPOLOGIES[name_or_instance]()
    except KeyError:
        names = ", ".join(TOPOLOGIES)
        raise ValueError(f"there is no topology {name_or_instance!r}: choose one of {names}, torus:ROWSxCOLS") from None
