"""How fast this job's ranks compute: the work of a method, measured where and with whom it will be done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collectives import Communicator, Ring
from collectives.arrays import aligned_empty
from collectives.network import LinkModel, Work
from collectives.probe import measure_latency
from collectives.timing import simulate_time
from mpicomp.algorithms import Algorithm
from mpicomp.bench.measure import gather, line_up

SAMPLE_S = 0.25  # about as long as a sample may travel
FEWEST, MOST = 1 << 18, 1 << 23  # elements of a sample
TINY = 64
WARM_UPS, CALLS, TINY_CALLS = 1, 3, 30


@dataclass(frozen=True)
class Speed:
    """What a method costs on this machine.

    Attributes
    ----------
    work : Work
    call_s : float
        Of a call, whatever its length.
    """

    work: Work
    call_s: float


def without_dense_rounds(algorithm: Algorithm) -> Algorithm:
    """The method as it is between its full-precision rounds."""
    if getattr(algorithm, "full_precision_every", None) is None:
        return algorithm
    changed: Algorithm = replace(algorithm, full_precision_every=None)  # type: ignore[type-var]
    return changed


def measure_speed(comm: Communicator, algorithm: Algorithm, n: int, dtype: str, network: LinkModel) -> Speed:
    """Run samples around a ring of all ranks, at most `n` elements long; collective, the same on every rank.

    Raises
    ------
    CollectiveError
    ValueError
        There is one rank, which merges nothing.
    """
    if comm.size == 1:
        raise ValueError("one rank merges nothing: start more of them with mpirun")
    algorithm = without_dense_rounds(algorithm)
    size = comm.size
    wire = algorithm.wire(n, dtype, size, comm.packed_piece_bytes())
    bytes_an_element = wire.nbytes(FEWEST, 1) / FEWEST
    fitting = SAMPLE_S * network.bandwidth_bytes_s / (2 * bytes_an_element)
    sample = int(min(n, MOST, max(FEWEST, fitting)))
    with Communicator(comm.mpi_comm, Ring(), comm.timeout, piece_bytes=comm.piece_bytes) as ring:
        costs = np.median(_costs(ring, algorithm, sample, dtype, CALLS), axis=0)
        tiny_s = float(np.median(_costs(ring, algorithm, TINY, dtype, TINY_CALLS), axis=0)[0])
    encoding_s, merging_s, decoding_s, other_s = costs[1:].tolist()
    merged = sample * (size - 1) / size
    messages = 2 * _messages(size, sample, algorithm, dtype, comm.packed_piece_bytes())
    work = Work(
        encoding_s / sample,
        merging_s / merged,
        decoding_s / sample,
        max(0.0, other_s) / messages,
    )
    # what travelling takes here, whatever network is predicted for
    here = LinkModel(measure_latency(comm), network.bandwidth_bytes_s)
    travelling_s = simulate_time(Ring(), size, TINY, wire.nbytes, here, alignment=wire.alignment)
    return Speed(work, max(0.0, tiny_s - travelling_s))


def _messages(size: int, n: int, algorithm: Algorithm, dtype: str, piece_bytes: int) -> int:
    """Messages that a rank of a ring sends."""
    wire = algorithm.wire(n, dtype, size, piece_bytes)
    return 2 * (size - 1) * -(-n // (size * wire.piece_elements))


def _costs(ring: Communicator, algorithm: Algorithm, n: int, dtype: str, calls: int) -> Any:
    """Per call: seconds of the slowest rank; and, as the mean over ranks, encoding, merging, decoding and the rest."""
    x, out = aligned_empty(n, dtype, 64), aligned_empty(n, dtype, 64)
    x[:] = np.random.default_rng((1, ring.rank)).standard_normal(n, np.float32)
    aggregator = algorithm.start(ring, n, dtype=dtype)
    mine = np.zeros((calls, 5))
    for call in range(-WARM_UPS, calls):
        line_up(ring)
        aggregator.aggregate(x, out)
        last = aggregator.traffic.last
        computing = last.seconds_encoding, last.seconds_merging, last.seconds_decoding
        if call >= 0:
            mine[call] = last.seconds_total, *computing, last.seconds_total - sum(computing) - last.seconds_waiting
    everyones = gather(ring, mine)
    found = everyones.mean(axis=0)
    found[:, 0] = everyones[:, :, 0].max(axis=0)
    return found
