"""How the messages of a communicator go: by which topology, how long they are, and in which steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from collectives import planner
from collectives.arrays.vectors import Flat
from collectives.consistency.call_check import Description, fingerprint
from collectives.cost.link import LinkModel
from collectives.execution.program import Program, compile_plan
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Plan, Topology
from collectives.schedules.ring import Ring

VERSION = 1  # of the wire format: ranks must agree on it
LATENCY_BYTES = 16_384  # packed payloads below this go in the fewest rounds
MOST_REMEMBERED = 512  # programs, and calls, of different lengths

_Value = TypeVar("_Value")


class Routes:
    """The routes of one communicator.

    Parameters
    ----------
    rank, size : int
    topology : str or Topology
        ``"auto"`` and ``"mpi"`` choose by payload size.
    network : LinkModel or None
        What "auto" chooses by, where it is known.
    piece_bytes : int or None
        Longest message, where the user has set it.
    eager_bytes : int
        Longest message of packed payloads where the user has not.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        topology: str | Topology,
        network: LinkModel | None,
        piece_bytes: int | None,
        eager_bytes: int,
    ) -> None:
        self._rank, self._size, self._topology, self._network = rank, size, topology, network
        self._piece_bytes, self._eager_bytes = piece_bytes, eager_bytes
        self._fastest: Callable[[int], Topology] | None = None
        if network is not None and size > 1:
            self._fastest = planner.fastest(size, network, self.packed_piece_bytes())
        self._plans: dict[Topology, Plan] = {}
        self._programs: dict[tuple[Topology, int, int, int], Program] = {}
        self._calls: dict[tuple[str, str, str, tuple[int, ...]], tuple[int, Callable[[], str]]] = {}

    def __str__(self) -> str:
        """What ranks must agree on."""
        pieces = f" in pieces of {self._piece_bytes} bytes" if self._piece_bytes else ""
        network = f" on {self._network}" if self._network is not None else ""
        return f"{self._topology}{pieces}{network}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The same, one thing each."""
        pieces = f"{self._piece_bytes} bytes" if self._piece_bytes else "the default length"
        network = "no known network" if self._network is None else str(self._network)
        return f"routes by {self._topology}", f"in pieces of {pieces}", f"on {network}", f"wire format {VERSION}"

    def select(self, payload_bytes: int) -> Topology:
        """See `Communicator.select`."""
        if not isinstance(self._topology, str):
            return self._topology
        if self._fastest is not None:
            return self._fastest(payload_bytes)
        return HalvingDoubling() if payload_bytes < LATENCY_BYTES else Ring()

    def gathers(self, payload_bytes: int) -> bool:
        """See `Communicator.gathers`."""
        few = payload_bytes * (self._size - 1) <= LATENCY_BYTES
        return self._size == 1 or (few and isinstance(self._topology, str))

    def packed_piece_bytes(self) -> int:
        """See `Communicator.packed_piece_bytes`."""
        return self._piece_bytes or self._eager_bytes

    def program(self, topology: Topology, n: int, alignment: int, piece_elements: int) -> Program:
        """See `Communicator.program`."""
        key = (topology, n, alignment, piece_elements)
        found = self._programs.get(key)
        if found is None:
            plan = self._plans.get(topology)
            if plan is None:
                plan = self._plans[topology] = topology.plan(self._rank, self._size)
            found = _remember(self._programs, key, compile_plan(plan, n, alignment, piece_elements))
        return found

    def all_reduce(self, source: Flat, op: str, name: str) -> tuple[int, Callable[[], str]]:
        """Fingerprint of an all-reduce by these routes, and what describes it in messages."""
        key = (name, op, source.dtype, source.shape)
        found = self._calls.get(key)
        if found is None:
            summing = f"{name}({op}) of {source.dtype}{list(source.shape)}"
            text = f"{summing} by {self}, wire format {VERSION}"
            described = Description(text, name, (summing, *self.parts))
            found = _remember(self._calls, key, (fingerprint(text), lambda: described))
        return found


def _remember(known: dict[Any, _Value], key: Any, value: _Value) -> _Value:
    """Keep a value, and forget the oldest one of too many."""
    if len(known) >= MOST_REMEMBERED:
        del known[next(iter(known))]
    known[key] = value
    return value
