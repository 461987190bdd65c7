"""Time that a topology takes on a modelled network, computed from its plans.

A message of b bytes occupies its sender's outgoing link, and a latency later its receiver's incoming link, for
overhead + b / bandwidth; the network buffers messages for a busy receiver. (This is LogGP with o counted on the links.)
Between groups it also occupies the sending group's uplink and the receiving group's, in the order in which messages
come there. Each rank has one link out and one in, which serve messages in plan order. It encodes pieces in the order in
which the plan needs them, merges arrived messages one after the other, and decodes final pieces. A piece is forwarded
as soon as it is merged; it does not wait for other pieces of its chunk.

The processor of a rank handles each message before sending and after receiving it. Encoding, merging and decoding have
a queue each, as if they did not disturb each other, all slowed by sharing. But a rank ends no earlier than its
processor, which it may share, has done all its work and moved all its messages. An executor that sends a ready message
before an earlier one to another peer that is not ready can be a little faster.

Reference: A. Alexandrov et al., "LogGP: incorporating long messages into the LogP model", J. Parallel Distrib. Comput.
44 (1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from collectives.annotations import AnyArray, Doubles, Indices
from collectives.cost.link import ComputeModel, LinkModel
from collectives.execution.program import partition, pieces
from collectives.schedules.broadcast import AllGather
from collectives.schedules.plan import Topology
from collectives.schedules.ring import Lockstep
from collectives.schedules.verify import PlannedMessage, all_plans, deliveries

NO_WORK = ComputeModel()


class _MessageBatch(NamedTuple):
    """Messages of equally many chunks that can be timed together."""

    # no two have the same source or the same destination, and none depends on another
    sources: Indices
    destinations: Indices
    first_chunks: Indices
    weights: Indices  # one per message, or one for all messages
    length: int
    merges: bool


def _batches(topology: Topology, size: int, longest: int) -> Iterator[_MessageBatch]:
    """Yield batches of messages, each after those it depends on, of about ``longest`` chunks at most if possible."""
    if isinstance(topology, Lockstep):
        ranks = np.arange(size)
        for e in topology.exchanges(ranks, size):
            yield _MessageBatch(ranks, e.send_to, e.sent, np.array([e.weight]), e.length, e.held_weight > 0)
        return
    batch: list[PlannedMessage] = []
    sources: set[int] = set()
    arrivals: dict[int, int] = {}  # by destination: the step in which the message arrives
    for m in deliveries(all_plans(topology, size)):
        kind = len(m.chunks), m.held_weight > 0
        if batch and (
            kind != (len(batch[0].chunks), batch[0].held_weight > 0)
            or m.source in sources
            or m.destination in arrivals
            or arrivals.get(m.source, m.source_step) < m.source_step
            or len(batch) * len(m.chunks) >= longest
        ):
            yield _pack(batch)
            batch, sources, arrivals = [], set(), {}
        batch.append(m)
        sources.add(m.source)
        arrivals[m.destination] = m.destination_step
    if batch:
        yield _pack(batch)


def _pack(batch: list[PlannedMessage]) -> _MessageBatch:
    sources, destinations, first_chunks, weights = np.array(
        [(m.source, m.destination, m.chunks.start, m.weight) for m in batch]
    ).T
    return _MessageBatch(sources, destinations, first_chunks, weights, len(batch[0].chunks), batch[0].held_weight > 0)


def _serve(ready: Doubles, free: Doubles, busy: AnyArray) -> Doubles:
    """Return the times at which entries of queues, one a row, are done; a row is served in order from ``free`` on."""
    done = busy.cumsum(axis=1)
    started: Doubles = np.maximum.accumulate(ready - (done - busy), axis=1)
    finished: Doubles = np.maximum(started, free[:, None]) + done
    return finished


class _Clocks:
    """Times from which each rank's links and queues are free, and from which it has each unit (a piece)."""

    def __init__(self, size: int, lengths: Indices, link: LinkModel, work: ComputeModel) -> None:
        self._lengths, self._link, self._work = lengths, link, work
        self.ready = np.zeros((size, lengths.size))
        self._out, self._in, self._encoder, self._merger = np.zeros((4, size))
        self._encoding, self._merging, self._moving = np.zeros((3, size))  # processor time
        n_groups = int(link.group(np.array([size - 1]))[0]) + 1 if size else 1
        self._up, self._down = np.zeros((2, n_groups))
        self._unencoded = np.ones((size, lengths.size), bool) if work.encode_s else None

    def _encode(self, ranks: Indices, units: Indices) -> None:
        """Encode those units of each rank (a row each) that it has not encoded yet."""
        if self._unencoded is not None:
            rows = ranks[:, None]
            new = self._unencoded[rows, units]
            if new.any():
                busy = new * self._lengths[units] * (self._work.sharing * self._work.encode_s)
                done = self._encoder[ranks][:, None] + busy.cumsum(axis=1)
                self.ready[rows, units] = np.where(new, done, self.ready[rows, units])
                self._encoder[ranks], self._unencoded[rows, units] = done[:, -1], False
                self._encoding[ranks] += busy.sum(axis=1)

    def deliver(self, sources: Indices, destinations: Indices, units: Indices, payload: Indices, merges: bool) -> None:
        """Send each source's units (a row each) to its destination; no rank is a source or a destination twice."""
        link, work = self._link, self._work
        self._encode(sources, units)
        filled = payload > 0
        busy = payload / link.bandwidth_bytes_s + link.overhead_s * filled
        handled = filled * (work.sharing * work.message_s)
        done = _serve(self.ready[sources[:, None], units] + handled, self._out[sources], busy)
        self._out[sources] = done[:, -1]
        here, there = link.group(sources), link.group(destinations)
        far = here != there
        if link.uplink_bytes_s is not None and far.any():
            shared = payload[far] / link.uplink_bytes_s
            passed = self._pass(done[far], busy[far], shared, here[far], self._up)
            done[far] = self._pass(passed, shared, shared, there[far], self._down)
        done = done + link.latencies(sources, destinations)[:, None]
        done = np.maximum(done, _serve(done - busy, self._in[destinations], busy))
        self._in[destinations] = done[:, -1]
        done = done + handled
        messages = filled.sum(axis=1) * work.message_s + payload.sum(axis=1) * work.byte_s
        self._moving[sources] += messages
        self._moving[destinations] += messages
        if merges:
            self._encode(destinations, units)
            merging = filled * self._lengths[units] * (work.sharing * work.merge_s)
            started = np.maximum(done, self.ready[destinations[:, None], units])
            done = _serve(started, self._merger[destinations], merging)
            self._merger[destinations] = done[:, -1]
            self._merging[destinations] += merging.sum(axis=1)
        elif self._unencoded is not None:
            # happens in an all-gather alone: in an all-reduce each rank has sent its own contribution before
            self._unencoded[destinations[:, None], units] = False
        self.ready[destinations[:, None], units] = done

    def _pass(self, done: Doubles, before: Doubles, busy: Doubles, groups: Indices, free: Doubles) -> Doubles:
        """Return the times at which messages leave links that groups share, served in the order of arrival."""
        # a message that left the previous link at `done` began to arrive here `before` seconds earlier
        comes = (done - np.minimum(before, busy)).ravel()
        group_of = np.repeat(groups, done.shape[1])
        order = np.lexsort((comes, group_of))  # by group, then by arrival
        present, firsts, counts = np.unique(group_of[order], return_index=True, return_counts=True)
        row = np.repeat(np.arange(present.size), counts)
        place = row, np.arange(order.size) - firsts[row]
        queue, work = np.full((present.size, counts.max()), -np.inf), np.zeros((present.size, counts.max()))
        queue[place], work[place] = comes[order], busy.ravel()[order]
        served = _serve(queue, free[present], work)
        free[present] = served[:, -1]
        left = np.empty(order.size)
        left[order] = served[place]
        return np.maximum(left.reshape(done.shape), done)

    def finish(self) -> float:
        """Return the time at which the last rank has decoded everything."""
        work, n = self._work, int(self._lengths.sum())
        self._encode(np.arange(len(self.ready)), np.tile(np.arange(self._lengths.size), (len(self.ready), 1)))
        last = self.ready
        if work.decode_s:
            order = np.argsort(self.ready, axis=1, kind="stable")
            ready = np.take_along_axis(self.ready, order, axis=1)
            decoding = self._lengths[order] * (work.sharing * work.decode_s)
            last = _serve(ready, np.zeros(len(ready)), decoding)
        busy = self._encoding + self._merging + work.sharing * (n * work.decode_s + self._moving)
        return float(max(last.max(), busy.max()))


def simulate_time(
    topology: Topology,
    size: int,
    n_elements: int,
    nbytes: Callable[[int, int], int],
    link: LinkModel,
    piece_elements: int | None = None,
    work: ComputeModel = NO_WORK,
    *,
    alignment: int = 64,
) -> float:
    """Return the seconds from the start until the last rank has the complete result.

    Parameters
    ----------
    topology : Topology
        Maker of the plans; also `AllGather`.
    size : int
        Number of ranks; thousands are fine.
    n_elements : int
        Length of the vector; for an all-gather, of each rank's vector.
    nbytes : callable
        ``nbytes(n_elements, weight)`` returns the bytes of a message of ``n_elements`` summed over ``weight`` ranks.
    link : LinkModel
        The network.
    piece_elements : int or None
        Chunks are cut into pieces of at most this length, each a message of its own; None: one message a chunk.
    work : ComputeModel
        Processor time of a rank.
    alignment : int
        Chunks and pieces start at multiples of this number of elements.

    Raises
    ------
    TopologyError
        The topology does not fit ``size`` ranks.
    """
    n_chunks = topology.plan(0, size).n_chunks
    gathers = isinstance(topology, AllGather)
    chunks = [range(n_elements)] * size if gathers else partition(n_elements, n_chunks, alignment)
    longest = max(1, n_elements) if piece_elements is None else piece_elements
    cut = [pieces(chunk, longest, alignment) for chunk in chunks]
    # All chunks get equally many units; those beyond a chunk's pieces are empty and cost nothing.
    n_units = max(1, *map(len, cut))
    lengths = np.zeros((n_chunks, n_units), dtype=np.int64)
    for chunk, parts in enumerate(cut):
        lengths[chunk, : len(parts)] = [len(part) for part in parts]
    kinds, kind_of_unit = np.unique(lengths.ravel(), return_inverse=True)

    @cache
    def payloads(weight: int) -> Indices:
        return np.array([nbytes(int(length), weight) if length else 0 for length in kinds], dtype=np.int64)

    clocks = _Clocks(size, lengths.ravel(), link, work)
    for sources, destinations, first_chunks, weights, length, merges in _batches(topology, size, 2**20 // n_units):
        units = first_chunks[:, None] * n_units + np.arange(length * n_units)
        table = np.stack([payloads(weight) for weight in weights.tolist()])
        payload = table[np.arange(len(weights))[:, None], kind_of_unit[units]]
        full = payload.any(axis=1)
        clocks.deliver(sources[full], destinations[full], units[full], payload[full], merges)
    return clocks.finish()
