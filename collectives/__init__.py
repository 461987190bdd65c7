"""Collectives on non-blocking MPI: schedules as data, two executors for all of them, payloads as opaque bytes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from collectives.error_report import report_early
from collectives.launcher import leave_mpi_uninitialized
from collectives.missing_mpi import explaining_mpi

if TYPE_CHECKING:
    from collectives.communicator import Communicator as Communicator
    from collectives.cost.link import LinkModel as LinkModel
    from collectives.errors import CollectiveError as CollectiveError
    from collectives.errors import CollectiveMismatch as CollectiveMismatch
    from collectives.errors import CollectiveTimeout as CollectiveTimeout
    from collectives.errors import CommunicatorClosed as CommunicatorClosed
    from collectives.errors import DamagedMessage as DamagedMessage
    from collectives.errors import LauncherMismatch as LauncherMismatch
    from collectives.errors import NonFiniteGradient as NonFiniteGradient
    from collectives.errors import NotARank as NotARank
    from collectives.errors import PeerFailure as PeerFailure
    from collectives.errors import RanksLost as RanksLost
    from collectives.execution.handle import Handle as Handle
    from collectives.execution.traffic import Traffic as Traffic
    from collectives.execution.traffic import TrafficLog as TrafficLog
    from collectives.schedules.halving_doubling import HalvingDoubling as HalvingDoubling
    from collectives.schedules.plan import Plan as Plan
    from collectives.schedules.plan import PlanError as PlanError
    from collectives.schedules.plan import Step as Step
    from collectives.schedules.plan import Topology as Topology
    from collectives.schedules.plan import TopologyError as TopologyError
    from collectives.schedules.plan import Transfer as Transfer
    from collectives.schedules.registry import TOPOLOGIES as TOPOLOGIES
    from collectives.schedules.registry import TopologyName as TopologyName
    from collectives.schedules.registry import topology as topology
    from collectives.schedules.ring import Ring as Ring
    from collectives.schedules.star import Direct as Direct
    from collectives.schedules.star import Star as Star
    from collectives.schedules.torus import Torus as Torus
    from collectives.schedules.tree import DoubleTree as DoubleTree
    from collectives.schedules.tree import Tree as Tree

# A module is loaded with the first use of a name of it: importing mpi4py.MPI initialises MPI, and code that only
# reads files or draws plans must work where MPI does not.
_HOMES = {
    "communicator": ("Communicator",),
    "cost.link": ("LinkModel",),
    "errors": (
        "CollectiveError",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "CommunicatorClosed",
        "DamagedMessage",
        "LauncherMismatch",
        "NonFiniteGradient",
        "NotARank",
        "PeerFailure",
        "RanksLost",
    ),
    "execution.handle": ("Handle",),
    "execution.traffic": ("Traffic", "TrafficLog"),
    "schedules.halving_doubling": ("HalvingDoubling",),
    "schedules.plan": ("Plan", "PlanError", "Step", "Topology", "TopologyError", "Transfer"),
    "schedules.registry": ("TOPOLOGIES", "TopologyName", "topology"),
    "schedules.ring": ("Ring",),
    "schedules.star": ("Direct", "Star"),
    "schedules.torus": ("Torus",),
    "schedules.tree": ("DoubleTree", "Tree"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


leave_mpi_uninitialized()
report_early()


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            with explaining_mpi():
                return getattr(import_module(f"{__name__}.{module}"), name)
    found = "" if name.startswith("_") else import_module("collectives.quoting").suggestion(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{found}")


def __dir__() -> list[str]:
    return __all__
