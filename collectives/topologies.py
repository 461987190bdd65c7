"""The topologies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from collectives.halving import HalvingDoubling
from collectives.plan import Topology
from collectives.ring import Ring
from collectives.star import Star
from collectives.torus import Torus
from collectives.tree import DoubleTree, Tree

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

    Raises
    ------
    ValueError
        There is no topology of that name.
    """
    if not isinstance(name_or_instance, str):
        return name_or_instance
    try:
        return TOPOLOGIES[name_or_instance]()
    except KeyError:
        raise ValueError(f"there is no topology {name_or_instance!r}: choose one of {', '.join(TOPOLOGIES)}") from None
