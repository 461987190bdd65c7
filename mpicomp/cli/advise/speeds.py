"""Speed of this job's processors: the work of a method, measured on all ranks at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from collectives import Communicator, Ring
from collectives.annotations import Doubles
from collectives.arrays.elements import aligned_empty
from collectives.cost.link import ComputeModel, LinkModel
from collectives.cost.simulate import simulate_time
from collectives.network_probe import measure_latency
from collectives.progress.polling import rest_by
from collectives.schedules.broadcast import AllGather
from mpicomp.algorithms import Algorithm, Dense, PerNode
from mpicomp.cli.timing import alternate, gather, spin_barrier

SAMPLE_S = 0.25  # time on the network for which samples are sized
FEWEST, MOST = 1 << 18, 1 << 23  # elements of a sample
TINY = 64
WARM_UPS, CALLS, QUICK_CALLS, TINY_CALLS = 1, 5, 3, 30
NAP_S = 1e-4  # between two tests of a rank that waits
SHARING_ELEMENTS, SHARING_S = 1 << 16, 0.15


@dataclass(frozen=True)
class Speed:
    """Cost of a method on this machine."""

    work: ComputeModel  # per element, message and byte
    call_s: float  # fixed cost of a call, for any length
    volume: float = 1.0  # bytes sent / the most that the messages could hold: below 1 for codes of variable length


@dataclass(frozen=True)
class NodeSpeed:
    """Nodes of equally many ranks, and the time in which the ranks of a node sum and gather a vector in memory."""

    ranks: int  # of each node
    call_s: float  # for any length
    element_s: float  # per element of a whole vector, while all nodes do this

    def seconds(self, n: int) -> float:
        """Return the time for `n` elements."""
        return self.call_s + n * self.element_s


def without_dense_rounds(algorithm: Algorithm) -> Algorithm:
    """Return the method without its full-precision rounds."""
    if algorithm.full_precision_every is None:
        return algorithm
    changed: Any = algorithm  # all methods are dataclasses, and their base is not
    found: Algorithm = replace(changed, full_precision_every=None)
    return found


def measure_speed(
    comm: Communicator, algorithm: Algorithm, n: int, dtype: str, network: LinkModel, quick: bool = False
) -> Speed:
    """Measure a method on samples of at most `n` elements, around a ring or its own route. Collective."""
    algorithm = without_dense_rounds(algorithm)
    # needs two ranks or more: one rank has no messages to time
    size = comm.size
    wire = algorithm.message_model(n, dtype, size, comm.routes.packed_piece_bytes())
    route = wire.route or Ring()
    gathers = isinstance(route, AllGather)
    shape = dtype, size, comm.routes.packed_piece_bytes()
    bytes_an_element = _traffic(algorithm, FEWEST, *shape)[1] / 2 / FEWEST  # each way
    calls, sample_s, most = (QUICK_CALLS, SAMPLE_S / 2, MOST // 4) if quick else (CALLS, SAMPLE_S, MOST)
    fitting = sample_s * network.bandwidth_bytes_s / bytes_an_element
    sample = int(min(n, most, max(FEWEST, fitting)))
    small = max(1, sample // 4)
    with Communicator(
        comm.mpi_comm, Ring(), comm.timeout, piece_bytes=comm.options.piece_bytes, arrival_timeout=comm.arrival_timeout
    ) as ring:
        costs = _costs(ring, algorithm, sample, dtype, calls)
        less = _costs(ring, algorithm, small, dtype, calls)
        tiny = _calls(ring, algorithm, TINY, dtype, TINY_CALLS, time.perf_counter)
        tiny_s = float(np.median(tiny[:, :, 0].max(axis=0)))
    encoding_s, merging_s, decoding_s, other_s, sent = costs.tolist()
    more, fewer = (_traffic(algorithm, some, *shape) for some in (sample, small))
    volume = 2 * sent / more[1]
    # the time on this network, which may differ from the network of the prediction
    here = LinkModel(measure_latency(comm), network.bandwidth_bytes_s)
    travelling_s = simulate_time(route, size, TINY, wire.nbytes, here, alignment=wire.alignment)
    sharing, left_s = measure_sharing(comm, comm.options.threads), max(0.0, tiny_s - travelling_s)
    # growth of a call if each message takes 1 s longer: messages wait for each other, and are handled at both ends
    of_messages = 2 * (1 if gathers else 2) * (size - 1) * sharing
    message_s, byte_s = _solve(
        (more[0], 2 * sent, other_s), (fewer[0], 2 * float(less[4]), float(less[3])), left_s / of_messages
    )
    merged, decoded = sample * (size - 1) / size, sample * (size if gathers and not wire.decoded_once else 1)
    # One thread was measured, and its part of a core while the threads of all ranks compute. The threads of a rank
    # share its work, except for dense sums.
    threads = 1 if isinstance(algorithm, Dense) else comm.options.threads
    encode_s, merge_s, decode_s = encoding_s / sample, merging_s / merged, decoding_s / decoded
    work = ComputeModel(encode_s / threads, merge_s / threads, decode_s / threads, message_s, byte_s, sharing)
    return Speed(work, max(0.0, left_s - of_messages * message_s), volume)


def measure_nodes(comm: Communicator, n: int, dtype: str, quick: bool = False) -> NodeSpeed | None:
    """Time sums of at most `n` elements within all nodes at once, with the same result on all; collective."""
    # there is one node, a rank on each, or nodes of different sizes
    if not has_equal_nodes(comm):
        return None
    local, method = comm.nodes.local, PerNode(Dense())  # on one node it only sums and gathers there
    long_n, calls = min(n, MOST // 4 if quick else MOST), QUICK_CALLS if quick else CALLS
    short_n = min(TINY, long_n)

    def median_s(length: int, calls: int) -> float:
        x, out = aligned_empty(length, dtype, 64), aligned_empty(length, dtype, 64)
        x[:] = 1
        aggregator = method.start(local, length, dtype=dtype)
        return float(np.median(alternate({"": partial(aggregator.aggregate, x, out)}, calls, WARM_UPS, comm)[""]))

    long_s, short_s = median_s(long_n, calls), median_s(short_n, TINY_CALLS)
    element_s = max(0.0, long_s - short_s) / max(1, long_n - short_n)
    return NodeSpeed(local.size, short_s, element_s)


def has_equal_nodes(comm: Communicator) -> bool:
    """Return True if there are two nodes or more, each of so many ranks, and of two or more."""
    each = comm.layout.ranks_of_each
    return each is not None and 1 < each < comm.size


def measure_sharing(comm: Communicator, threads: int = 1) -> float:
    """Return elapsed time / processor time of a thread while the threads of all ranks compute."""
    x = np.ones(SHARING_ELEMENTS, np.float32)
    parts: list[float] = []

    def compute() -> None:
        start, used = time.perf_counter(), -time.thread_time()
        while (spent := time.perf_counter() - start) < SHARING_S:
            x.sum()
        parts.append((used + time.thread_time()) / spent)

    others = [threading.Thread(target=compute) for _ in range(threads - 1)]
    spin_barrier(comm)
    for thread in others:
        thread.start()
    compute()
    for thread in others:
        thread.join()
    return max(1.0, 1 / float(gather(comm, np.array([np.mean(parts)])).mean()))


def _traffic(algorithm: Algorithm, n: int, dtype: str, size: int, piece_bytes: int) -> tuple[int, int]:
    """Return the messages and bytes that a rank sends and receives, around a ring or over the method's own route."""
    wire = algorithm.message_model(n, dtype, size, piece_bytes)
    route = wire.route or Ring()
    plan = route.plan(0, size)
    chunk = n if isinstance(route, AllGather) else -(-n // plan.n_chunks)
    weights = [sent.weight for step in plan.steps for sent in step.sends]
    pieces = -(-chunk // wire.piece_elements)
    return 2 * len(weights) * pieces, 2 * sum(wire.nbytes(chunk, weight) for weight in weights)


def _solve(more: tuple[int, float, float], less: tuple[int, float, float], most_s: float) -> tuple[float, float]:
    """Return seconds per message and per byte, neither negative, from two (messages, bytes, seconds)."""
    (m1, b1, s1), (m2, b2, s2) = more, less
    determinant = m1 * b2 - m2 * b1
    message_s = (s1 * b2 - s2 * b1) / determinant if determinant else s1 / m1
    # at most `most_s`, from a call of few elements; where a limit applies, the first measurement alone fits
    message_s = max(0.0, min(message_s, s1 / m1, most_s))
    return message_s, max(0.0, s1 - m1 * message_s) / b1  # rounding can make it negative


def _costs(ring: Communicator, algorithm: Algorithm, n: int, dtype: str, calls: int) -> Doubles:
    """Return processor seconds of encoding, merging, decoding and moving, and bytes sent: medians, mean over ranks."""
    # Wall time would contain the work of other ranks on a shared core. A waiting rank either polls, which counts as
    # moving, or sleeps, which slows down its next work: both are measured, and the lesser times count.
    polling = _stages(_calls(ring, algorithm, n, dtype, calls, time.thread_time))
    before = rest_by(lambda: time.sleep(NAP_S))
    try:
        sleeping = _stages(_calls(ring, algorithm, n, dtype, calls, time.thread_time))
    finally:
        rest_by(before)
    return np.minimum(polling, sleeping)


def _stages(everyones: Doubles) -> Doubles:
    """Return encoding, merging, decoding, the rest of the total, and bytes, from the results of `_calls`."""
    total, encoding, merging, decoding, sent = np.median(everyones, axis=1).mean(axis=0)
    return np.array([encoding, merging, decoding, max(0.0, total - encoding - merging - decoding), sent])


def _calls(
    ring: Communicator, algorithm: Algorithm, n: int, dtype: str, calls: int, clock: Callable[[], float]
) -> Doubles:
    """Return, for each rank and call, total, encoding, merging and decoding seconds of a clock, and bytes sent."""
    x, out = aligned_empty(n, dtype, 64), aligned_empty(n, dtype, 64)
    x[:] = np.random.default_rng((1, ring.rank)).standard_normal(n, np.float32)
    aggregator = algorithm.start(ring, n, dtype=dtype)
    aggregator.traffic.clock = clock
    mine = np.zeros((WARM_UPS + calls, 5))
    for call in mine:
        spin_barrier(ring)
        aggregator.aggregate(x, out)
        last = aggregator.traffic.last
        call[:4] = last.seconds_total, last.seconds_encoding, last.seconds_merging, last.seconds_decoding
        call[4] = last.bytes_sent
    return gather(ring, mine[WARM_UPS:])
