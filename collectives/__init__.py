"""Collectives on non-blocking MPI: schedules as data, two executors for all of them, payloads as opaque bytes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from collectives.children import leave_mpi_uninitialized
from collectives.mpi_library import explained

if TYPE_CHECKING:
    from collectives.communicator import Communicator
    from collectives.cost.link import LinkModel
    from collectives.errors import (
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        CommunicatorClosed,
        LauncherMismatch,
        NonFiniteGradient,
        NotARank,
        PeerFailure,
    )
    from collectives.execution.handle import Handle
    from collectives.schedules.halving_doubling import HalvingDoubling
    from collectives.schedules.plan import Plan, PlanError, Step, Topology, TopologyError, Transfer
    from collectives.schedules.registry import TOPOLOGIES, topology
    from collectives.schedules.ring import Ring
    from collectives.schedules.star import Direct, Star
    from collectives.schedules.torus import Torus
    from collectives.schedules.tree import DoubleTree, Tree
    from collectives.trace.traffic import Traffic, TrafficLog

# A module is loaded when a name of it is first asked for: importing mpi4py.MPI initialises MPI, and code that only
# reads files or draws plans must work where MPI does not.
_HOMES = {
    "communicator": ("Communicator",),
    "cost.link": ("LinkModel",),
    "errors": (
        "CollectiveError",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "CommunicatorClosed",
        "LauncherMismatch",
        "NonFiniteGradient",
        "NotARank",
        "PeerFailure",
    ),
    "execution.handle": ("Handle",),
    "schedules.halving_doubling": ("HalvingDoubling",),
    "schedules.plan": ("Plan", "PlanError", "Step", "Topology", "TopologyError", "Transfer"),
    "schedules.registry": ("TOPOLOGIES", "topology"),
    "schedules.ring": ("Ring",),
    "schedules.star": ("Direct", "Star"),
    "schedules.torus": ("Torus",),
    "schedules.tree": ("DoubleTree", "Tree"),
    "trace.traffic": ("Traffic", "TrafficLog"),
}

__all__ = [
    "TOPOLOGIES",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorClosed",
    "Direct",
    "DoubleTree",
    "HalvingDoubling",
    "Handle",
    "LauncherMismatch",
    "LinkModel",
    "NonFiniteGradient",
    "NotARank",
    "PeerFailure",
    "Plan",
    "PlanError",
    "Ring",
    "Star",
    "Step",
    "Topology",
    "TopologyError",
    "Torus",
    "Traffic",
    "TrafficLog",
    "Transfer",
    "Tree",
    "topology",
]


leave_mpi_uninitialized()


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            with explained():
                return getattr(import_module(f"{__name__}.{module}"), name)
    found = "" if name.startswith("_") else import_module("collectives.spelling").suggestion(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{found}")


def __dir__() -> list[str]:
    return sorted(__all__)
