"""Collectives on non-blocking MPI: schedules as data, one executor for all of them, payloads as opaque bytes."""

from collectives.communicator import Communicator
from collectives.direct import Direct
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NonFiniteGradient,
    PeerFailure,
)
from collectives.halving import HalvingDoubling
from collectives.handle import Handle
from collectives.network import LinkModel
from collectives.plan import Plan, PlanError, Step, Topology, TopologyError, Transfer
from collectives.ring import Ring
from collectives.star import Star
from collectives.topologies import TOPOLOGIES, topology
from collectives.torus import Torus
from collectives.traffic import Traffic, TrafficLog
from collectives.tree import DoubleTree, Tree

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
