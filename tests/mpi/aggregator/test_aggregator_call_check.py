"""Aggregators of different methods, options or vectors: one text on every rank, and the run goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collectives import CollectiveMismatch, Communicator
from mpicomp import Dense, Marsit
from tests.mpi.lanes import few_ranks, same_text_on

pytestmark = [few_ranks, pytest.mark.mpi(min_size=2)]

N = 1000
OURS = Marsit(full_precision_every=100)
Start = Callable[[Communicator], Any]


def restored(comm: Communicator, change: dict[str, Any]) -> Any:
    """Start Marsit and load a changed state."""
    aggregator = OURS.start(comm, N)
    aggregator.load_state_dict(aggregator.state_dict() | change)
    return aggregator


# The last rank's call while the others start Marsit(100) for float32[1000], and its description in the error.
DIFFERENT: dict[str, tuple[Start, str]] = {
    "K": (lambda c: Marsit(full_precision_every=50).start(c, N), "full_precision_every=50"),
    "seed": (lambda c: Marsit(seed=1).start(c, N), "seed=1"),
    "residual": (lambda c: Marsit(residual="paper").start(c, N), "residual='paper'"),
    "winners": (lambda c: Marsit(winners=2).start(c, N), "winners=2"),
    "method": (lambda c: Dense().start(c, N), "Dense()"),
    "length": (lambda c: OURS.start(c, N + 1), f"float32[{N + 1}]"),
    "dtype": (lambda c: OURS.start(c, N, dtype=np.float64), f"float64[{N}]"),
    "vector": (lambda c: OURS.start(c, N, vector_id=5), "number 5"),
    "tensors": (lambda c: OURS.start(c, N, tensor_lengths=(100, N - 128)), "in 2 tensors"),
    "step": (lambda c: restored(c, {"step": 8}), "step 8"),
    "state": (lambda c: restored(c, {"magnitudes": np.ones(1)}), "restored with gamma 4.0 and magnitudes"),
}


@pytest.mark.parametrize("comm", ["auto", "ring"], indirect=True)
@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_is_told_who_differs_in_what(comm: Communicator, what: str) -> None:
    odd = comm.size - 1
    start, told = DIFFERENT[what]
    aggregator = start(comm) if comm.rank == odd else OURS.start(comm, N)
    with pytest.raises(CollectiveMismatch) as caught:
        aggregator.aggregate(np.ones(aggregator.n, aggregator.dtype))
    text = same_text_on(comm, caught.value, range(comm.size))
    mine = re.search(rf"rank {odd}: ([^;]*)", text)
    theirs = re.search(r"rank.? 0[-0-9]*: ([^;]*)", text)
    assert mine is not None
    assert theirs is not None
    assert told in mine[1]
    assert told not in theirs[1]
    assert len(text) < 600
    if what != "method":
        assert re.search(rf"call 1, aggregate by Marsit: rank.* 0[-0-9]*: [^;]*; rank {odd}: [^;]*\. Make", text)
    assert (comm.allreduce(np.ones(3)) == comm.size).all()


# The last rank's argument, and its description in the error.
UNFIT: dict[str, tuple[Any, type[Exception], str]] = {
    "integers": (np.ones(N, np.int64), TypeError, "type int64"),
    "non-contiguous": (np.ones(2 * N, np.float32)[::2], ValueError, "not contiguous"),
    "requires grad": (torch.ones(N, requires_grad=True), TypeError, r"tensor\.detach\(\)"),
    "another dtype": (np.ones(N), TypeError, "type float64, the aggregator was started for float32"),
    "a list": ([1.0] * N, TypeError, "list: pass a NumPy array"),
    "negated": (torch._neg_view(torch.ones(N)), ValueError, r"tensor\.resolve_neg\(\)"),
    "masked": (np.ma.ones(N, np.float32), TypeError, "masked"),
    "no values": (torch.ones(N, device="meta"), ValueError, "device meta"),
    "another length": (np.ones(N - 1, np.float32), ValueError, f"{N - 1} elements, .* for {N}"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_one_rank_cannot_aggregate_all_hear_of_and_the_run_goes_on(comm: Communicator, what: str) -> None:
    odd = comm.size - 1
    vector, kind, told = UNFIT[what]
    aggregator, twin = OURS.start(comm, N), OURS.start(comm, N)
    ones = np.ones(N, np.float32)
    aggregator.aggregate(ones)
    twin.aggregate(ones)
    with pytest.raises(kind if comm.rank == odd else CollectiveMismatch) as caught:
        aggregator.aggregate(vector if comm.rank == odd else ones)
    text = same_text_on(comm, caught.value, range(odd))
    assert comm.rank < odd or re.search(f"rank {odd} of {comm.size}, vector 0: .*{told}", str(caught.value))
    assert re.search(f"rank {odd} rejects aggregate: .*{told}", text)
    assert (aggregator.aggregate(ones) == twin.aggregate(ones)).all()


@pytest.mark.parametrize("odd_one", ["vector", "out"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float64_vector_of_one_rank_is_no_16_bit_one(comm: Communicator, dtype: str, odd_one: str) -> None:
    """NumPy takes float64 for equal to no type at all, which stands for bfloat16."""
    culprit = comm.rank == comm.size - 1
    aggregator = Dense().start(comm, N, dtype=dtype)
    given = {"vector": torch.ones(N, dtype=getattr(torch, dtype)), "out": torch.ones(N, dtype=getattr(torch, dtype))}
    if culprit:
        given[odd_one] = np.full(N, 7.0)
    with pytest.raises(TypeError if culprit else CollectiveMismatch, match=f"started for {dtype}"):
        aggregator.aggregate(**given)
    assert not culprit or (given[odd_one] == 7).all()


def test_what_one_rank_cannot_start_all_hear_of_in_their_next_call(comm: Communicator) -> None:
    odd = comm.size - 1
    if comm.rank == odd:
        with pytest.raises(TypeError, match=r"1000.5 is no number of elements"):
            OURS.start(comm, 1000.5)
    else:
        aggregator = OURS.start(comm, N)
        with pytest.raises(CollectiveMismatch, match=rf"rank {odd} rejects start: .*1000.5 is no number of elements"):
            aggregator.aggregate(np.ones(N, np.float32))


def test_vectors_larger_than_memory_are_refused_on_all_ranks_and_the_run_goes_on(comm: Communicator) -> None:
    with pytest.raises(MemoryError, match=rf"rank {comm.rank} of {comm.size}, start: a vector of 10{{12}} elements"):
        OURS.start(comm, 10**12)
    assert (OURS.start(comm, N).aggregate(np.ones(N, np.float32)) == 1).all()


def test_a_vector_larger_than_memory_on_one_rank_is_a_mismatch_on_the_others(comm: Communicator) -> None:
    culprit = comm.rank == comm.size - 1
    with pytest.raises(
        MemoryError if culprit else CollectiveMismatch, match=f"rank {comm.size - 1} .*10{{12}} elements"
    ):
        OURS.start(comm, 10**12 if culprit else N).aggregate(np.ones(N, np.float32))
    assert comm.allreduce(1) == comm.size
