"""Methods with codecs: pieces, topologies and saved states change nothing; sizes; NaN; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient, Star
from collectives.consistency.recursive_doubling import rounds_of
from mpicomp import ECQSGD, QSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad
from mpicomp.codecs import Draw, OneBit, TwoMeans
from mpicomp.kernels.streams import Stream
from tests.mpi.lanes import TIMEOUT_S, same_everywhere
from tests.reference.compressors import decoded
from tests.reference.one_process.codec_methods import codec_of, gradients

METHODS: tuple[Any, ...] = (
    QSGD(bucket=100),
    ECQSGD(alpha=0.3),
    TernGrad(bucket=1000),
    OneBitSGD(),
    LocalTopK(10),
    DoubleSqueeze(OneBit(512)),
    MemSGD(OneBit(512)),
)


@pytest.mark.parametrize(
    "method", [ECQSGD(alpha=0.3, bucket=512), TernGrad(bucket=500), DoubleSqueeze(OneBit(512))], ids=str
)
def test_neither_topology_nor_pieces_change_a_bit(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n, found = 40_000, []
    ways: list[tuple[Any, int | None]] = [("ring", None), ("ring", 512), (Star(), None), (Star(), 1000), ("auto", None)]
    for topology, piece_bytes in ways:
        with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes) as comm:
            aggregator = method.start(comm, n)
            results = [aggregator.aggregate(gradients(comm.size, n, np.float32, s)[comm.rank]) for s in range(3)]
            assert same_everywhere(comm, np.array(results))
            found.append(results)
    for results in found[1:]:
        np.testing.assert_array_equal(results, found[0])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_goes_on_exactly_from_a_saved_state(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n = 2000
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        whole = method.start(comm, n)
        vectors = [gradients(comm.size, n, np.float32, step)[comm.rank] for step in range(8)]
        expected = [whole.aggregate(vector) for vector in vectors]
        first, second = method.start(comm, n), method.start(comm, n)
        for vector in vectors[:4]:
            first.aggregate(vector)
        second.load_state_dict(first.state_dict())
        for vector, result in zip(vectors[4:], expected[4:], strict=True):
            np.testing.assert_array_equal(second.aggregate(vector), result)
        with pytest.raises(ValueError, match="is not one of"):
            second.load_state_dict({"n": n, "step": 3})


@pytest.mark.parametrize("topology", ["ring", "star"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_nan_on_one_rank_is_named_on_all_and_changes_nothing(
    mpi_comm: MPI.Intracomm, method: Any, topology: str
) -> None:
    n = 2000
    with Communicator(mpi_comm, topology, TIMEOUT_S) as comm:
        aggregator, twin = method.start(comm, n), method.start(comm, n)
        good = gradients(comm.size, n, np.float32, 0)[comm.rank]
        aggregator.aggregate(good)
        twin.aggregate(good)
        bad = good.copy()
        if comm.rank == comm.size - 1:
            bad[n // 2] = np.nan
        with pytest.raises(NonFiniteGradient, match=rf"from rank {comm.size - 1}"):
            aggregator.aggregate(bad)
        np.testing.assert_array_equal(aggregator.aggregate(good), twin.aggregate(good))


@pytest.mark.parametrize(
    "method",
    [OneBitSGD(), DoubleSqueeze(OneBit(512)), DoubleSqueeze(TwoMeans(512)), MemSGD(OneBit(512, "l1"))],
    ids=str,
)
def test_a_coordinate_that_is_always_zero_swings_by_one_scale_of_each_pass_at_most(
    mpi_comm: MPI.Intracomm, method: Any
) -> None:
    """Zeros go out as signs; what that adds is taken back at a later step, so no coordinate drifts."""
    n, steps = 2000, 10
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator = method.start(comm, n)
        moved, workers, owners, farthest = np.zeros(n), np.zeros(n), np.zeros(n), 0.0
        for step in range(steps):
            g = gradients(comm.size, n, np.float32, step)[comm.rank]
            nothing_drawn = Draw(Stream(0, 0, "none"), step, comm.rank)
            sent = decoded(aggregator.worker.codec, g + aggregator.worker.residual, nothing_drawn)
            result = aggregator.aggregate(g)
            workers = np.maximum(workers, np.abs(sent))  # the largest so far of each element's
            if isinstance(method, DoubleSqueeze):
                owners = np.maximum(owners, np.abs(result))
            moved += result
            most = mean_of_ranks(comm, workers) + owners
            assert (np.abs(moved) <= 1.0001 * most)[::17].all(), step
            farthest = max(farthest, np.abs(moved[::17]).max())
        assert farthest > 0


def mean_of_ranks(comm: Communicator, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """In double precision."""
    total = np.empty_like(x)
    comm.mpi_comm.Allreduce(x, total)
    return total / comm.size


class Written:
    """A codec of messages of any length, and the bytes of those that it has written."""

    def __init__(self, codec: Any) -> None:
        self.codec, self.bytes = codec, 0
        self.alignment, self.nbytes, self.used, self.decode = codec.alignment, codec.nbytes, codec.used, codec.decode

    def encode(self, values: NDArray[Any], payload: NDArray[np.uint8], *, draw: Draw) -> None:
        self.codec.encode(values, payload, draw=draw)
        self.bytes += self.codec.used(payload, values.size)


def test_of_entropy_codes_mpi_gets_the_bytes_that_were_written(mpi_comm: MPI.Intracomm) -> None:
    """Each rank sends its own codes and all others' but those of the rank that they come round to."""
    n, size = 20_000, mpi_comm.size
    side_channel = 8 * (size - 1)
    agreement = 8 * sum(one.sends for one in rounds_of(mpi_comm.rank, size)) if size > 1 else 0
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=4096) as comm:
        aggregator = ECQSGD(alpha=0.3, bucket=512).start(comm, n)
        written: Any = Written(aggregator.worker.codec)
        aggregator.worker.codec = written
        for step in range(3):
            written.bytes = 0
            aggregator.aggregate(gradients(size, n, np.float32, step)[comm.rank])
            of_ranks = comm.mpi_comm.allgather(written.bytes)
            passed_on = sum(of_ranks) - of_ranks[(comm.rank + 1) % size]
            assert aggregator.traffic.last.bytes_sent == passed_on + side_channel + agreement
            assert 0 < written.bytes < written.nbytes(n)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_bytes_are_the_formulas(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n, size = 64_000, mpi_comm.size
    entropy_coded = "entropy" in str(method)
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator = method.start(comm, n)
        aggregator.aggregate(gradients(size, n, np.float32, 0)[comm.rank])
        sent = np.array(comm.mpi_comm.allgather(aggregator.traffic.last.bytes_sent))
    flags = 8 * (size - 1)  # whether all went well
    if isinstance(method, DoubleSqueeze | MemSGD):
        codec = method.compressor
        back = 4 * n if isinstance(method, MemSGD) else codec.nbytes(n)
        expected = (size - 1) * (codec.nbytes(n) + back)  # all ranks together, but for what rounding to words adds
        if entropy_coded:
            assert sent.sum() - size * flags < expected
            return
        assert expected <= sent.sum() - size * flags <= 1.02 * expected + 64 * size * size
    else:
        scales = 4 * -(-n // method.bucket) if isinstance(method, TernGrad) else 0
        expected = (size - 1) * (codec_of(method).nbytes(n) + scales)
        if entropy_coded:
            assert (sent - flags <= expected / 4).all()  # 0 where there is one rank
            return
        assert (sent - flags >= expected).all()
        assert (sent - flags <= 1.02 * expected + 64 * size).all()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ECQSGD(alpha=0), "alpha must be a finite number above 0"),
        (lambda: ECQSGD(beta=1.5), "beta must be between 0 and 1, not 1.5"),
        (lambda: QSGD(levels=200), "levels must be an integer of 1 to 127, not 200"),
        (lambda: TernGrad(clip=0), "above 0, or None, not 0"),
        (lambda: TernGrad(clip=float("inf")), "a finite number of sigma above 0, or None, not inf"),
        (lambda: OneBitSGD(bucket=0), "bucket must be an integer of 1 to"),
        (lambda: DoubleSqueeze("zip"), "there is no compressor 'zip'"),
        (lambda: MemSGD("clip:bits=3"), "bits must be an integer of 9 to 32"),
    ],
)
def test_options_out_of_range_are_refused_when_they_are_made(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
