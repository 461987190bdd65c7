"""Predicted time of a step, from a model of the network and the measured speed of the ranks' processors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from collectives import TOPOLOGIES, HalvingDoubling, Ring, Topology, TopologyError, Torus
from collectives.cost.link import LinkModel
from collectives.cost.simulate import simulate_time
from collectives.group.routes import tori
from collectives.schedules.broadcast import AllGather
from collectives.schedules.star import Direct
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.cli.advise.speeds import NodeSpeed, Speed

LOWEST, HIGHEST = 1e4, 1e13  # bytes per second: limits of the search for break-even
FARTHER, CLOSE, STEPS = 8.0, 1.03, 10  # factor by which the search widens, its accuracy, and its most steps
MOST_WALKED = 64  # ranks for which topologies of WALKED are predicted; others are computed for all ranks at once
# Topologies whose plans are simulated rank by rank: those without `Lockstep`, and others whose steps are too many.
WALKED = ("tree", "double-tree", "star", "segmented-ring", AllGather().name, Direct().name)


@dataclass(frozen=True)
class PredictedJob:
    """All-reduce of `n` elements on `size` ranks; packed payloads are sent in pieces of `piece_bytes`."""

    size: int
    n: int
    dtype: str
    network: LinkModel
    piece_bytes: int
    # neighbouring ranks form nodes, which may sum vectors before they send to other nodes
    nodes: NodeSpeed | None = None

    def between_nodes(self) -> PredictedJob:
        """Return the all-reduce between nodes of one rank's part of the vector; a node's ranks share its link."""
        assert self.nodes is not None
        link, local = self.network, self.nodes.ranks
        latency_s, bandwidth, uplink, group = link.latency_s, link.bandwidth_bytes_s, link.uplink_bytes_s, None
        if link.group_size is not None and link.group_size > local:  # of several nodes
            group, uplink = link.group_size // local, None if uplink is None else uplink / local
            network = replace(link, group_size=group, uplink_bytes_s=uplink)
        else:
            latency_s = latency_s if link.between_latency_s is None else link.between_latency_s
            bandwidth = bandwidth if uplink is None else min(bandwidth, uplink / local)
            network = LinkModel(latency_s, bandwidth, link.overhead_s)
        return replace(self, size=self.size // local, n=-(-self.n // local), network=network, nodes=None)

    def scale_links(self, factor: float) -> PredictedJob:
        """Return the same job with all links faster by a factor."""
        link = self.network
        uplink = None if link.uplink_bytes_s is None else link.uplink_bytes_s * factor
        scaled = replace(link, bandwidth_bytes_s=link.bandwidth_bytes_s * factor, uplink_bytes_s=uplink)
        return replace(self, network=scaled)


@dataclass(frozen=True)
class Way:
    """A method over a topology or its own route, between all ranks or between nodes."""

    method: str
    algorithm: Algorithm
    topology: Topology
    speed: Speed
    dense_speed: Speed  # of full-precision rounds
    per_node: bool = False  # between nodes, whose ranks sum in memory

    def seconds(self, job: PredictedJob) -> float:
        """Return the predicted time of a call, the mean for a method with full-precision rounds."""
        if self.per_node:
            assert job.nodes is not None
            return job.nodes.seconds(job.n) + replace(self, per_node=False).seconds(job.between_nodes())
        every = self.algorithm.full_precision_every
        seconds = call_seconds(job, self.algorithm, self.topology, self.speed)
        if every is None:
            return seconds
        part: float = 1 / every
        return (1 - part) * seconds + part * call_seconds(job, Dense(), self.topology, self.dense_speed)


def _call_seconds(job: PredictedJob, algorithm: Algorithm, topology: Topology, speed: Speed) -> float:
    """Return the predicted time of a call without full-precision rounds, over a topology or the method's own route."""
    wire = algorithm.message_model(job.n, job.dtype, job.size, job.piece_bytes)

    def nbytes(elements: int, weight: int) -> int:
        return round(speed.volume * wire.nbytes(elements, weight))

    decode_s = speed.work.decode_s / (job.size if wire.decoded_once else 1)  # the simulator decodes all ranks' payloads
    work = replace(speed.work, decode_s=decode_s)
    travelling_s = simulate_time(
        topology, job.size, job.n, nbytes, job.network, wire.piece_elements, work, alignment=wire.alignment
    )
    return speed.call_s + travelling_s


call_seconds: Callable[..., float] = lru_cache(maxsize=4096)(_call_seconds)  # arguments are hashable: all are frozen


def topologies(size: int, network: LinkModel) -> Iterator[tuple[str, Topology]]:
    """Yield all topologies that fit, by name; tori of the most square shape, and of a row per group of ranks."""
    for name, make in TOPOLOGIES.items():
        if size > MOST_WALKED and name in WALKED:
            continue
        if name == "torus":
            yield from ((f"torus:{one.rows}x{one.cols}", one) for one in tori(size, network))
            continue
        try:
            make().plan(0, size)
        except TopologyError:
            continue
        yield name, make()


def ways(
    job: PredictedJob, methods: Mapping[str, tuple[Algorithm, Speed]], dense_speed: Speed
) -> Iterator[tuple[str, Way]]:
    """Yield every method over every topology that fits, or its own route, with the route's name; then between nodes."""
    for method, (algorithm, speed) in methods.items():
        for per_node in (False, True) if job.nodes is not None else (False,):
            part = job.between_nodes() if per_node else job
            if not is_predicted(algorithm, part.size, part.n, part.dtype, part.piece_bytes):
                continue
            route = algorithm.message_model(part.n, part.dtype, part.size, part.piece_bytes).route
            fitting = topologies(part.size, part.network) if route is None else [(route.name, route)]
            for name, topology in fitting:
                yield name, Way(method, algorithm, topology, speed, dense_speed, per_node)


def is_predicted(algorithm: Algorithm, size: int, n: int, dtype: str, piece_bytes: int) -> bool:
    """Return False if the method has a route of its own that is not predicted for so many ranks."""
    route = algorithm.message_model(n, dtype, size, piece_bytes).route
    return route is None or size <= MOST_WALKED or route.name not in WALKED


def break_even(way: Way, dense: Callable[[PredictedJob], float], job: PredictedJob) -> float | None:
    """Return the bytes per second of a link below which a way beats a dense sum, to a few percent."""

    # None: it is never faster; infinity: it is always faster
    def lead(factor: float) -> float:
        """Return log(time of the dense sum / time of the way) on links `factor` times as fast."""
        scaled = job.scale_links(factor)
        return math.log(dense(scaled) / way.seconds(scaled))

    here = job.network.bandwidth_bytes_s
    won = lead(1.0)
    low, high = (1.0, FARTHER) if won > 0 else (1 / FARTHER, 1.0)
    leads = (won, lead(high)) if won > 0 else (lead(low), won)
    while leads[1] > 0 and here * high < HIGHEST:
        low, high = high, high * FARTHER
        leads = leads[1], lead(high)
    while leads[0] < 0 and here * low > LOWEST:
        low, high = low / FARTHER, low
        leads = lead(low), leads[0]
    if leads[0] < 0:
        return None
    if leads[1] > 0:
        return math.inf
    for _ in range(STEPS):
        # intersection of the straight line between both ends with 0, not too near to either
        part = min(0.9, max(0.1, leads[0] / (leads[0] - leads[1])))
        middle = low * (high / low) ** part
        found = lead(middle)
        low, high, leads = (middle, high, (found, leads[1])) if found > 0 else (low, middle, (leads[0], found))
        if high / low < CLOSE:
            break
    return here * math.sqrt(low * high)


def fastest_dense(job: PredictedJob, speed: Speed) -> Callable[[PredictedJob], float]:
    """Return the time of our own dense sum, over the best topology that moves the fewest bytes, as a function."""
    frugal = [one for _, one in topologies(job.size, job.network) if isinstance(one, Ring | HalvingDoubling | Torus)]
    return cache(lambda other: min(call_seconds(other, Dense(), topology, speed) for topology in frugal))
