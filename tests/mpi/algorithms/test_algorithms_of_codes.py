"""Methods with codecs: bytes on the wire, and coordinates that do not drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, Star
from collectives.consistency.recursive_doubling import rounds_of
from mpicomp import ECQSGD, QSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad
from mpicomp.codecs import Draw, OneBit, Quantizer, TwoMeans
from mpicomp.kernels.streams import Stream
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S, few_ranks, mean_of_ranks
from tests.reference.compressors import decoded
from tests.reference.one_process.codec_methods import codec_of

METHODS: tuple[Any, ...] = (
    QSGD(bucket=100),
    ECQSGD(alpha=0.3),
    TernGrad(bucket=1000),
    OneBitSGD(),
    LocalTopK(10),
    DoubleSqueeze(OneBit(512)),
    MemSGD(OneBit(512)),
)


@few_ranks
@pytest.mark.parametrize(
    "method",
    [OneBitSGD(), DoubleSqueeze(OneBit(512)), DoubleSqueeze(TwoMeans(512)), MemSGD(OneBit(512, "l1"))],
    ids=str,
)
def test_a_coordinate_that_is_always_zero_swings_by_one_scale_of_each_pass_at_most(
    comm: Communicator, method: Any
) -> None:
    """Zeros go out as signs; a later step takes their values back, so no coordinate drifts."""
    n, steps = 2000, 10
    aggregator, codec = method.start(comm, n), getattr(method, "compressor", None) or codec_of(method)
    moved, workers, owners, farthest = np.zeros(n), np.zeros(n), np.zeros(n), 0.0
    for step in range(steps):
        g, kept = gradient(comm.rank, step, n), aggregator.state_dict()
        nothing_drawn = Draw(Stream(0, 0, "none"), step, comm.rank)
        sent = decoded(codec, g + kept.get("worker_error", kept.get("residual")), nothing_drawn)
        result = aggregator.aggregate(g)
        workers = np.maximum(workers, np.abs(sent))  # the largest so far of each element's
        if isinstance(method, DoubleSqueeze):
            owners = np.maximum(owners, np.abs(result))
        moved += result
        most = mean_of_ranks(comm, workers) + owners
        assert (np.abs(moved) <= 1.0001 * most)[::97].all(), step
        farthest = max(farthest, np.abs(moved[::97]).max())
    assert farthest > 0


def test_of_entropy_codes_mpi_gets_the_bytes_that_were_written(
    mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank sends its own codes and all others' but those of the rank that they come round to."""
    n, size, written = 20_000, mpi_comm.size, [0]
    agreement = 8 * sum(one.sends for one in rounds_of(mpi_comm.rank, size)) if size > 1 else 0
    encode = Quantizer.encode_telling

    def counted(self: Quantizer, values: Any, payload: Any, told: Any, *, draw: Draw) -> None:
        encode(self, values, payload, told, draw=draw)
        written[0] += self.count_used(payload, values.size)

    monkeypatch.setattr(Quantizer, "encode_telling", counted)
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=4096) as comm:
        method = ECQSGD(alpha=0.3, bucket=512)
        aggregator = method.start(comm, n)
        for step in range(3):
            written[0] = 0
            aggregator.aggregate(gradient(comm.rank, step, n))
            of_ranks = comm.mpi_comm.allgather(written[0])
            passed_on = sum(of_ranks) - of_ranks[(comm.rank + 1) % size]
            assert aggregator.traffic.last.bytes_sent == passed_on + 8 * (size - 1) + agreement
            assert 0 < written[0] < method.codec.nbytes(n)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_bytes_are_the_formulas(comm: Communicator, method: Any) -> None:
    n, size = 64_000, comm.size
    entropy_coded = "entropy" in str(method)
    aggregator = method.start(comm, n)
    aggregator.aggregate(gradient(comm.rank, 0, n))
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
        in_comparison = 3 * size * scales  # a few messages, each with the scales of all ranks
        assert (sent - flags <= 1.02 * expected + 64 * size + in_comparison).all()


@pytest.mark.parametrize("method", [QSGD(), OneBitSGD(), LocalTopK(100, 6400)], ids=str)
def test_the_root_of_a_star_sends_the_mean_and_the_others_their_codes(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n, size = 64_000, mpi_comm.size
    with Communicator(mpi_comm, Star(), TIMEOUT_S) as comm:
        aggregator = method.start(comm, n)
        aggregator.aggregate(gradient(comm.rank, 0, n))
        sent = aggregator.traffic.last.bytes_sent - 8 * (size - 1)  # whether all went well
    expected = 4 * n * (size - 1) if mpi_comm.rank == 0 else codec_of(method).nbytes(n)
    assert expected <= sent <= 1.02 * expected + 128 * size
