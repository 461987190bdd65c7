"""Methods with codecs equal all their ranks in one process, to the bit, over many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from collectives import Communicator
from mpicomp import ECQSGD, QSGD, DoubleSqueeze, LocalTopK, MemSGD, OneBitSGD, TernGrad, TopKSGD
from mpicomp.codecs import OneBit, Quantizer, Ternary, TwoMeans
from tests.mpi.lanes import TIMEOUT_S
from tests.reference.one_process.codec_methods import OneProcess, gradients, owned

EVERY_SIZE = True
LENGTHS = {0: 1, 1: 2, 900: 20}  # and how many steps are taken
VECTOR = 6  # its words are not those of vector 0
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
    DoubleSqueeze("random-sparsification:p=0.9", seed=5),
    LocalTopK(10),
    TopKSGD(7),
    MemSGD(OneBit(512)),
    MemSGD(Ternary(256)),
    MemSGD("random-sparsification:p=0.75"),
)
OF_EACH_KIND: tuple[Any, ...] = (
    ECQSGD(alpha=0.3, bucket=512),
    QSGD(),
    TernGrad(bucket=500),
    OneBitSGD(),
    LocalTopK(50),
    TopKSGD(50),
    DoubleSqueeze(),
    MemSGD(TwoMeans(512)),
    MemSGD("random-sparsification:p=0.75"),
)


def on_root(comm: Communicator, make: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 makes, on all ranks: one process takes the steps of all, not each of them."""
    return comm.mpi_comm.bcast(make(*arguments) if comm.rank == 0 else None)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equals_all_ranks_in_one_process_bit_for_bit(mpi_comm: MPI.Intracomm, method: Any) -> None:
    for n, steps in LENGTHS.items():
        with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
            aggregator = method.start(comm, n, vector_id=VECTOR)
            reference = OneProcess(method, comm.size, n, np.float32, VECTOR)
            for step in range(steps):
                every = gradients(comm.size, n, np.float32, step)
                result = aggregator.aggregate(every[comm.rank].copy())
                expected = on_root(comm, reference.step, every)
                np.testing.assert_array_equal(result, expected, f"n {n}, step {step}")
            state = on_root(comm, vars, reference)
            if isinstance(method, DoubleSqueeze | MemSGD):
                np.testing.assert_array_equal(aggregator.worker.residual, state["errors"][comm.rank])
                if isinstance(method, DoubleSqueeze):
                    np.testing.assert_array_equal(owned(aggregator), state["owners"])
            elif aggregator.residual.size:
                np.testing.assert_array_equal(aggregator.residual, state["errors"][comm.rank])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("method", OF_EACH_KIND, ids=str)
def test_other_float_types_keep_their_precision(mpi_comm: MPI.Intracomm, method: Any, dtype: Any) -> None:
    n = 2003
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator, reference = method.start(comm, n, dtype=dtype), OneProcess(method, comm.size, n, dtype)
        for step in range(3):
            every = gradients(comm.size, n, dtype, step)
            result = aggregator.aggregate(every[comm.rank].copy())
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, on_root(comm, reference.step, every))
        if isinstance(method, DoubleSqueeze):
            # of 16-bit results the owner keeps what rounding took from them, too
            np.testing.assert_array_equal(owned(aggregator), on_root(comm, vars, reference)["owners"])


@pytest.mark.parametrize("method", [QSGD(), DoubleSqueeze(), MemSGD()], ids=str)
def test_bfloat16_is_the_float32_result_rounded(mpi_comm: MPI.Intracomm, method: Any) -> None:
    n = 1000
    with Communicator(mpi_comm, "ring", TIMEOUT_S) as comm:
        aggregator, reference = method.start(comm, n, dtype="bfloat16"), OneProcess(method, comm.size, n, "bfloat16")
        for step in range(5):
            every = torch.from_numpy(gradients(comm.size, n, np.float32, step)).to(torch.bfloat16)
            result = aggregator.aggregate(every[comm.rank])
            assert result.dtype == torch.bfloat16
            np.testing.assert_array_equal(result.float().numpy(), reference.step(every.float().numpy()))
        if isinstance(method, DoubleSqueeze):
            np.testing.assert_array_equal(owned(aggregator), reference.owners)
