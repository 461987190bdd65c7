"""Collectives on non-blocking MPI: schedules as data, one executor for all of them, payloads as opaque bytes."""

from collectives.communicator import Communicator
from collectives.cost.link import LinkModel
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NonFiniteGradient,
    PeerFailure,
)
from collectives.execution.handle import Handle
from collectives.schedules.direct import Direct
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Plan, PlanError, Step, Topology, TopologyError, Transfer
from collectives.schedules.registry import TOPOLOGIES, topology
from collectives.schedules.ring import Ring
from collectives.schedules.star import Star
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree, Tree
from collectives.trace.traffic import Traffic, TrafficLog

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
    "LinkModel",
    "NonFiniteGradient",
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
