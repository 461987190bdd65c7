"""Methods with codecs: equal to all ranks in one process, to the bit, over many steps; sizes; NaN; resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient, Star
from mpicomp import ECQSGD, QSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad, TopKSGD
from mpicomp.codecs import Codec, Draw, OneBit, Quantizer, Ternary, TwoMeans
from mpicomp.random import Stream
from tests.mpi.collectives.conftest import TIMEOUT_S
from tests.mpi.collectives.lanes import same_everywhere
from tests.reference.compressors import decoded, float32, norm

EVERY_SIZE = True
LENGTHS = {0: 1, 1: 2, 1700: 20}  # and how many steps are taken
METHODS: tuple[Any, ...] = (
    QSGD(levels=4, bucket=100),
    ECQSGD(alpha=0.3, beta=0.9, bucket=4096),
    ECQSGD(alpha=0.3, bucket=1000, levels=1, coding="fixed"),
    TernGrad(bucket=1000),
    TernGrad(bucket=50, clip=None, seed=4),
    OneBitSGD(bucket=512),
    DoubleSqueeze(),
    DoubleSqueeze(OneBit(64, "l1")),
    DoubleSqueeze(Quantizer(500, 2, "l2"), seed=3),
    DoubleSqueeze("quantize:coding=entropy,bucket=640"),
    DoubleSqueeze("clip:bits=11"),
    DoubleSqueeze("top-k:rate=10"),
    LocalTopK(10),
    TopKSGD(7),
    MemSGD(OneBit(512)),
    MemSGD(Ternary(256)),
)

Vectors = NDArray[Any]


class OneProcess:
    """All ranks' steps from the definitions, with the reference codecs.

    Parameters
    ----------
    method : Algorithm
    size, n : int
    dtype : type
    """

    def __init__(self, method: Any, size: int, n: int, dtype: Any) -> None:
        self.method, self.size, self.n, self.dtype, self.t = method, size, n, dtype, 0
        self.compute = np.float64 if dtype == np.float64 else np.float32
        self.errors = np.zeros((size, n), self.compute)
        self.owners = np.zeros(n, self.compute)

    def step(self, gradients: Vectors) -> Vectors:
        """Row m is rank m's vector; returns what every rank gets."""
        g = gradients.astype(self.compute)
        two_passes = isinstance(self.method, DoubleSqueeze | MemSGD)
        result = self.squeezed(g) if two_passes else self.gathered(g)
        self.t += 1
        return result.astype(self.dtype)

    def draw(self, purpose: str, rank: int) -> Draw:
        return Draw(Stream(getattr(self.method, "seed", 0), 0, purpose), self.t, rank)

    def mean(self, sent: list[Vectors]) -> Vectors:
        total = sent[0].copy()
        for vector in sent[1:]:
            total += vector
        return total / self.compute(self.size)

    def gathered(self, g: Vectors) -> Vectors:
        codec = codec_of(self.method)
        scales = self.shared_scales(g) if isinstance(self.method, TernGrad) else None
        sent = []
        for rank in range(self.size):
            draw, error = self.draw("code", rank), self.errors[rank]
            if isinstance(self.method, ECQSGD):
                alpha, beta = (self.compute(number) for number in (self.method.alpha, self.method.beta))
                q = decoded(codec, error * alpha + g[rank], draw)
                self.errors[rank] = error * beta + (g[rank] - q)
            elif isinstance(self.method, OneBitSGD | LocalTopK):
                p = g[rank] + error
                q = decoded(codec, p, draw)
                self.errors[rank] = p - q
            else:
                q = decoded(codec, g[rank], draw, scales)
            sent.append(q)
        return self.mean(sent)

    def shared_scales(self, g: Vectors) -> NDArray[np.float32]:
        """TernGrad's: the largest of the ranks', each at most `clip` times its root mean square."""
        bucket, clip = self.method.bucket, self.method.clip
        found = [np.float32(0)] * -(-self.n // bucket)
        for row in g:
            for number in range(len(found)):
                part = row[number * bucket : (number + 1) * bucket]
                scale = norm(part, "linf")
                if clip is not None:
                    scale = min(scale, clip * (norm(part, "l2") / np.sqrt(part.size)))
                found[number] = max(found[number], float32(scale))
        return np.array(found, np.float32)

    def squeezed(self, g: Vectors) -> Vectors:
        codec: Codec = self.method.compressor
        sent = []
        for rank in range(self.size):
            v = g[rank] + self.errors[rank]
            q = decoded(codec, v, self.draw("code of worker", rank))
            self.errors[rank] = v - q
            sent.append(q)
        mean = self.mean(sent)
        if isinstance(self.method, MemSGD):
            return mean
        v = mean + self.owners
        result = decoded(codec, v, self.draw("code of owner", 0))
        self.owners = v - result
        return result


def codec_of(method: Any) -> Codec:
    """Of a method whose codes are gathered."""
    found: Codec = method.codec("float32") if isinstance(method, TopKSGD) else method.codec
    return found


def gradients(size: int, n: int, dtype: Any, step: int) -> Vectors:
    """Different on every rank, some of it zero, its size changing along the vector."""
    rng = np.random.default_rng((size, n, step))
    made = rng.standard_normal((size, n)) * np.linspace(0.1, 3, max(n, 1))[:n]
    made[:, ::17] = 0
    return made.astype(dtype)


def owned(aggregator: Any) -> Vectors:
    """The owner errors of all ranks in one vector."""
    total = np.zeros_like(aggregator.owner.residual)
    aggregator.comm.mpi_comm.Allreduce(aggregator.owner.residual, total)
    return total


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equals_all_ranks_in_one_process_bit_for_bit(mpi_comm: MPI.Intracomm, method: Any) -> None:
    for n, steps in LENGTHS.items():
        with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
            aggregator, reference = method.start(comm, n), OneProcess(method, comm.size, n, np.float32)
            for step in range(steps):
                every = gradients(comm.size, n, np.float32, step)
                result = aggregator.aggregate(every[comm.rank].copy())
                np.testing.assert_array_equal(result, reference.step(every), f"n {n}, step {step}")
            if isinstance(method, DoubleSqueeze | MemSGD):
                np.testing.assert_array_equal(aggregator.worker.residual, reference.errors[comm.rank])
                if isinstance(method, DoubleSqueeze):
                    np.testing.assert_array_equal(owned(aggregator), reference.owners)
            elif aggregator.residual.size:
                np.testing.assert_array_equal(aggregator.residual, reference.errors[comm.rank])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("method", [ECQSGD(alpha=0.3), DoubleSqueeze(), MemSGD(TwoMeans(512))], ids=str)
def test_other_float_types_keep_their_precision(mpi_comm: MPI.Intracomm, method: Any, dtype: Any) -> None:
    n = 5003
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator, reference = method.start(comm, n, dtype=dtype), OneProcess(method, comm.size, n, dtype)
        for step in range(5):
            every = gradients(comm.size, n, dtype, step)
            result = aggregator.aggregate(every[comm.rank].copy())
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, reference.step(every))


def test_bfloat16_is_the_float32_result_rounded(mpi_comm: MPI.Intracomm) -> None:
    every = torch.from_numpy(gradients(mpi_comm.size, 1000, np.float32, 0)).to(torch.bfloat16)
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        for method in (QSGD(), DoubleSqueeze(), MemSGD()):
            result = method.start(comm, 1000, dtype="bfloat16").aggregate(every[comm.rank])
            expected = OneProcess(method, comm.size, 1000, np.float32).step(every.float().numpy())
            assert torch.equal(result, torch.from_numpy(expected).to(torch.bfloat16)), method


@pytest.mark.parametrize("method", [ECQSGD(alpha=0.3, bucket=512), DoubleSqueeze(OneBit(512))], ids=str)
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
    n = 3000
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


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_nan_on_one_rank_is_named_on_all_and_changes_nothing(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n = 3000
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
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


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_bytes_are_the_formulas(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n, size = 64_000, mpi_comm.size
    entropy_coded = "entropy" in str(method)
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator = method.start(comm, n)
        aggregator.aggregate(gradients(size, n, np.float32, 0)[comm.rank])
        sent = np.array(comm.mpi_comm.allgather(aggregator.traffic.last.bytes_sent))
    flags = size - 1
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
            assert (sent - flags < expected / 4).all()
            return
        assert (sent - flags >= expected).all()
        assert (sent - flags <= 1.02 * expected + 64 * size).all()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ECQSGD(alpha=0), "alpha is above 0, not 0"),
        (lambda: ECQSGD(beta=1.5), "beta lies between 0 and 1, not at 1.5"),
        (lambda: QSGD(levels=200), "1 to 127 levels, not 200"),
        (lambda: TernGrad(clip=0), "above 0, or None, not 0"),
        (lambda: OneBitSGD(bucket=0), "1 or more elements, not 0"),
        (lambda: DoubleSqueeze("zip"), "there is no compressor 'zip'"),
        (lambda: MemSGD("clip:bits=3"), "9 to 32 bits"),
    ],
)
def test_options_out_of_range_are_refused_when_they_are_made(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
