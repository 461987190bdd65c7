"""The time a topology takes on a modelled network, from its plans alone.

A message of b bytes occupies its sender's outgoing link, and a latency later its receiver's incoming link, for
overhead + b / bandwidth; the network holds what waits for a busy receiver. (This is LogGP with o counted on the links.)
Each rank has one link out and one in, which serve messages in plan order, and merges what has arrived one message after
the other. Nothing else waits: a piece is forwarded as soon as it is merged, whatever its chunk's other pieces do.

An executor that lets a ready message overtake one to another peer that is not ready yet can be a little faster.

Reference: A. Alexandrov et al., "LogGP: incorporating long messages into the LogP model", J. Parallel Distrib. Comput.
44 (1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.partition import partition, pieces
from collectives.plan import Topology
from collectives.ring import Lockstep
from collectives.simulate import Delivery, all_plans, deliveries

Ints = NDArray[np.int64]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Every rank's link, at one speed or, between groups of ranks, at another.

    Parameters
    ----------
    latency_s : float
        From a byte's leaving to its arriving; messages in flight overlap.
    bandwidth_bytes_s : float
        Of each rank's link, in each direction.
    overhead_s : float
        Per message, while which the link carries nothing else.
    group_size : int or None
        Ranks 0 to group_size - 1 form the first group, and so on; None puts all ranks in one.
    between_latency_s, between_bandwidth_bytes_s : float or None
        For messages between groups; None: as within. A group's ranks do not share this bandwidth: where they share
        one uplink, give each its part.

    Raises
    ------
    ValueError
        A time is negative, or a bandwidth or the group size not positive.
    """

    latency_s: float
    bandwidth_bytes_s: float
    overhead_s: float = 0.0
    group_size: int | None = None
    between_latency_s: float | None = None
    between_bandwidth_bytes_s: float | None = None

    def __post_init__(self) -> None:
        times = (self.latency_s, self.overhead_s, self.between_latency_s or 0.0)
        speeds = (self.bandwidth_bytes_s, self.between_bandwidth_bytes_s, self.group_size)
        if min(times) < 0 or any(speed is not None and speed <= 0 for speed in speeds):
            raise ValueError(f"times must not be negative, bandwidths and group size must be positive: {self}")

    def latencies(self, sources: Ints, destinations: Ints) -> Seconds:
        """Latency of each message."""
        return self._by_distance(sources, destinations, self.latency_s, self.between_latency_s)

    def seconds_per_byte(self, sources: Ints, destinations: Ints) -> Seconds:
        """Time each message occupies its links for, per byte."""
        between = None if self.between_bandwidth_bytes_s is None else 1 / self.between_bandwidth_bytes_s
        return self._by_distance(sources, destinations, 1 / self.bandwidth_bytes_s, between)

    def _by_distance(self, sources: Ints, destinations: Ints, within: float, between: float | None) -> Seconds:
        if self.group_size is None or between is None:
            return np.full(sources.shape, within)
        return np.where(sources // self.group_size == destinations // self.group_size, within, between)


class _Batch(NamedTuple):
    """Messages of one and the same number of chunks that can be timed together.

    No two have the same source or the same destination, and none needs what another brings.
    """

    sources: Ints
    destinations: Ints
    first_chunks: Ints
    weights: Ints  # one a message, or one for all
    length: int
    merges: bool


def _batches(topology: Topology, size: int, longest: int) -> Iterator[_Batch]:
    """All messages, each after those it needs; of at most about ``longest`` chunks together, where that is a choice."""
    if isinstance(topology, Lockstep):
        ranks = np.arange(size)
        for e in topology.exchanges(ranks, size):
            yield _Batch(ranks, e.send_to, e.sent, np.array([e.weight]), e.length, e.held_weight > 0)
        return
    batch: list[Delivery] = []
    sources: set[int] = set()
    arrivals: dict[int, int] = {}  # the destinations, and the step of theirs that the message arrives in
    for m in deliveries(all_plans(topology, size)):
        kind = len(m.chunks), m.held_weight > 0
        if batch and (
            kind != (len(batch[0].chunks), batch[0].held_weight > 0)
            or m.source in sources
            or m.destination in arrivals
            or arrivals.get(m.source, m.source_step) < m.source_step
            or len(batch) * len(m.chunks) >= longest
        ):
            yield _packed(batch)
            batch, sources, arrivals = [], set(), {}
        batch.append(m)
        sources.add(m.source)
        arrivals[m.destination] = m.destination_step
    if batch:
        yield _packed(batch)


def _packed(batch: list[Delivery]) -> _Batch:
    sources, destinations, first_chunks, weights = np.array(
        [(m.source, m.destination, m.chunks.start, m.weight) for m in batch]
    ).T
    return _Batch(sources, destinations, first_chunks, weights, len(batch[0].chunks), batch[0].held_weight > 0)


def _serve(ready: Seconds, free: Seconds, busy: Seconds) -> Seconds:
    """When each row's queue, served in order by a server that is free at ``free``, is done with each entry."""
    done = busy.cumsum(axis=1)
    started: Seconds = np.maximum.accumulate(ready - (done - busy), axis=1)
    finished: Seconds = np.maximum(started, free[:, None]) + done
    return finished


def simulate_time(
    topology: Topology,
    size: int,
    n_elements: int,
    nbytes: Callable[[int, int], int],
    link: LinkModel,
    piece_elements: int | None = None,
    merge_s_per_byte: float = 0.0,
    *,
    alignment: int = 64,
) -> float:
    """Seconds from the start until the last rank has the complete result.

    Parameters
    ----------
    topology : Topology
        Whose plans to run.
    size : int
        Ranks; thousands are fine.
    n_elements : int
        Length of the vector.
    nbytes : callable
        ``nbytes(n_elements, weight)``, the payload of a message of that many elements summed over that many ranks.
    link : LinkModel
        The network.
    piece_elements : int or None
        Chunks are cut into pieces of at most this length, each a message of its own; None: one message a chunk.
    merge_s_per_byte : float
        Time to merge a byte of payload.
    alignment : int
        Elements; chunks and pieces start at multiples of it.

    Raises
    ------
    TopologyError
        The topology does not fit ``size`` ranks.
    """
    n_chunks = topology.plan(0, size).n_chunks
    chunks = partition(n_elements, n_chunks, alignment)
    longest = max(1, n_elements) if piece_elements is None else piece_elements
    cut = [pieces(chunk, longest, alignment) for chunk in chunks]
    # All chunks get equally many units; those beyond a chunk's pieces are empty and cost nothing.
    n_units = max(1, *map(len, cut))
    lengths = np.zeros((n_chunks, n_units), dtype=np.int64)
    for chunk, parts in enumerate(cut):
        lengths[chunk, : len(parts)] = [len(part) for part in parts]
    kinds, kind_of_unit = np.unique(lengths.ravel(), return_inverse=True)

    @cache
    def payloads(weight: int) -> Ints:
        return np.array([nbytes(int(length), weight) if length else 0 for length in kinds], dtype=np.int64)

    out_free, in_free, merger_free = np.zeros((3, size))
    ready = np.zeros((size, n_chunks * n_units))
    for sources, destinations, first_chunks, weights, length, merges in _batches(topology, size, 2**20 // n_units):
        units = first_chunks[:, None] * n_units + np.arange(length * n_units)
        table = np.stack([payloads(weight) for weight in weights.tolist()])
        payload = table[np.arange(len(weights))[:, None], kind_of_unit[units]]
        full = payload.any(axis=1)
        if not full.all():
            sources, destinations, units, payload = sources[full], destinations[full], units[full], payload[full]
        latency = link.latencies(sources, destinations)[:, None]
        busy = payload * link.seconds_per_byte(sources, destinations)[:, None] + link.overhead_s * (payload > 0)
        sent = _serve(ready[sources[:, None], units], out_free[sources], busy)
        arrived = _serve(sent - busy + latency, in_free[destinations], busy)
        out_free[sources], in_free[destinations] = sent[:, -1], arrived[:, -1]
        if merges:
            arrived = _serve(arrived, merger_free[destinations], payload * merge_s_per_byte)
            merger_free[destinations] = arrived[:, -1]
        ready[destinations[:, None], units] = arrived
    return float(ready.max())
