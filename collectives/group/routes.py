"""Routes of a communicator's messages: topology, longest message, and compiled plans.

On a network that is known, "auto" takes the topology that the model of time finds fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeVar

from collectives.arrays.vectors import Flat
from collectives.consistency.descriptions import Description, fingerprint
from collectives.cost.link import LinkModel
from collectives.cost.simulate import simulate_time
from collectives.execution.program import Program, compile_plan
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Plan, Topology
from collectives.schedules.ring import Ring
from collectives.schedules.torus import Torus
from collectives.schedules.tree import DoubleTree

VERSION = 1  # of the wire format: ranks must agree on it
LATENCY_BYTES = 16_384  # packed payloads below this go in the fewest rounds
MOST_REMEMBERED = 512  # programs, and calls, of different lengths
ALIGNMENT = 8  # bytes: chunks begin at words

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Routes:
    """The routes of one communicator.

    Packed payloads travel in messages of `piece_bytes` where the user has set it, else of `eager_bytes`. `link` is the
    emulated link in words, if there is one.
    """

    version = VERSION

    def __init__(
        self,
        rank: int,
        size: int,
        topology: str | Topology,
        network: LinkModel | None,
        piece_bytes: int | None,
        eager_bytes: int,
        link: str = "",
    ) -> None:
        self._rank, self._size, self._topology, self.network = rank, size, topology, network
        self._piece_bytes, self.eager_bytes = piece_bytes, eager_bytes
        self._link = link
        self._fastest: Callable[[int], Topology] | None = None
        if network is not None and size > 1:
            self._fastest = fastest(size, network, self.packed_piece_bytes())
        self._plans: dict[Topology, Plan] = {}
        self._programs: dict[tuple[Topology, int, int, int], Program] = {}
        self._calls: dict[tuple[str, str, str, tuple[int, ...]], tuple[int, Callable[[], str]]] = {}

    def of_ranks(self, rank: int, size: int) -> Routes:
        """Return the same routes for another group of ranks."""
        return Routes(rank, size, self._topology, self.network, self._piece_bytes, self.eager_bytes, self._link)

    def __str__(self) -> str:
        """Return the routes in words: ranks must agree on them."""
        pieces = f" in pieces of {self._piece_bytes} bytes" if self._piece_bytes else ""
        network = f" on {self.network}" if self.network is not None else ""
        link = f" over an emulated link of {self._link}" if self._link else ""
        return f"{self._topology}{pieces}{network}{link}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The same words, one property each."""
        pieces = f"{self._piece_bytes} bytes" if self._piece_bytes else "the default length"
        network = "no known network" if self.network is None else str(self.network)
        link = f"an emulated link of {self._link}" if self._link else "no emulated link"
        routes = f"routes by {self._topology}", f"in pieces of {pieces}", f"on {network}", f"over {link}"
        return *routes, f"wire format {VERSION}"

    def select(self, payload_bytes: int) -> Topology:
        """Return the topology for a payload of this size."""
        if not isinstance(self._topology, str):
            return self._topology
        if self._fastest is not None:
            return self._fastest(payload_bytes)
        return HalvingDoubling() if payload_bytes < LATENCY_BYTES else Ring()

    def gathers(self, payload_bytes: int) -> bool:
        """Return True if packed payloads of this size are fastest by one all-gather that every rank merges."""
        few = payload_bytes * (self._size - 1) <= LATENCY_BYTES
        return self._size == 1 or (few and isinstance(self._topology, str))

    def packed_piece_bytes(self) -> int:
        """Return the longest message of packed payloads."""
        return self._piece_bytes or self.eager_bytes

    def program(self, topology: Topology, n: int, alignment: int, piece_elements: int) -> Program:
        """Return the program of this rank's part of an all-reduce of `n` elements, compiled once."""
        key = (topology, n, alignment, piece_elements)
        found = self._programs.get(key)
        if found is None:
            plan = self._plans.get(topology)
            if plan is None:
                plan = self._plans[topology] = topology.plan(self._rank, self._size)
            found = _remember(self._programs, key, compile_plan(plan, n, alignment, piece_elements))
        return found

    def all_reduce(self, source: Flat, op: str, name: str) -> tuple[int, Callable[[], str]]:
        """Return the fingerprint of an all-reduce by these routes, and a function that returns its description."""
        key = (name, op, source.dtype, source.shape)
        found = self._calls.get(key)
        if found is None:
            summing = f"{name}({op}) of {source.dtype}{list(source.shape)}"
            text = f"{summing} by {self}, wire format {VERSION}"
            described = Description(text, name, (summing, *self.parts))
            found = _remember(self._calls, key, (fingerprint(text), lambda: described))
        return found


def _remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    """Keep a value, and forget the oldest one of too many."""
    if len(known) >= MOST_REMEMBERED:
        del known[next(iter(known))]
    known[key] = value
    return value


def fastest(size: int, network: LinkModel, piece_bytes: int) -> Callable[[int], Topology]:
    """Return a function from payload bytes to the fastest topology; sizes are rounded up to powers of two.

    Only the network counts. Ranks compute about equally long in all topologies.
    """

    @cache
    def of_power(power: int) -> Topology:
        best, best_s = None, float("inf")
        for topology in sorted(_candidates(size, network), key=lambda one: len(one.plan(0, size).steps)):
            at_least_s = len(topology.plan(0, size).steps) * network.latency_s
            if best is None or at_least_s < best_s:
                seconds = simulate_time(
                    topology, size, 1 << power, lambda n, weight: n, network, piece_bytes, alignment=ALIGNMENT
                )
                if best is None or seconds < best_s:
                    best, best_s = topology, seconds
        assert best is not None
        return best

    return lambda nbytes: of_power(max(0, nbytes - 1).bit_length())


def _candidates(size: int, network: LinkModel) -> tuple[Topology, ...]:
    return Ring(), HalvingDoubling(), DoubleTree(), *tori(size, network)


def tori(size: int, network: LinkModel) -> list[Torus]:
    """Return the most square torus, and one with a row per group of ranks; a torus that is only a ring is left out."""
    shapes = {Torus().shape(size)}
    if network.group_size is not None and size % network.group_size == 0:
        shapes.add((size // network.group_size, network.group_size))
    return [Torus(*shape) for shape in sorted(shapes) if min(shape) > 1]
