"""Vectors in every method: accepted forms, results, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mpicomp import Communicator, Dense, Marsit, NonFiniteGradient
from mpicomp.algorithms import ALGORITHMS, Aggregator, Auto, CascadingSSDM
from tests.methods import METHODS

N = 4096 + 77
DTYPES = ("float16", "bfloat16", "float32", "float64")
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def vector(n: int = N, dtype: str = "float32", seed: int = 0) -> Any:
    """Normal values, as NumPy where it has the type and else as torch."""
    values = np.random.default_rng(seed).standard_normal(n)
    return torch.tensor(values, dtype=torch.bfloat16) if dtype == "bfloat16" else values.astype(dtype)


def start(method: Any, comm: Communicator, n: int = N, dtype: str = "float32") -> Aggregator:
    aggregator: Aggregator = method.start(comm, n, dtype=dtype)
    return aggregator


def test_all_methods_are_tested_here() -> None:
    assert {type(method) for method in METHODS.values()} == {*ALGORITHMS.values(), Auto}


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_type_and_length_comes_back_finite_and_the_vector_is_left_alone(
    method: Any, dtype: str, comm: Communicator
) -> None:
    for n in (0, 1, 63, 64, 65, N):
        aggregator = start(method, comm, n, dtype)
        for step in range(4):
            given = vector(n, dtype, step)
            before = given + 0
            result = aggregator.aggregate(given)
            assert type(result) is type(given)
            assert (result.dtype, result.shape) == (given.dtype, given.shape)
            assert torch.isfinite(torch.as_tensor(result)).all()
            assert (given == before).all()


@every_method
def test_however_a_vector_is_given_the_bits_are_the_same(method: Any, comm: Communicator) -> None:
    """Pass a tensor, another shape, memory for the result, and a read-only vector."""
    plain, of_tensors, shaped, placed, read_only = (start(method, comm) for _ in range(5))
    memory = np.zeros(N + 3, np.float32)
    for step, out in enumerate((np.empty(N, np.float32), memory[3:], memory[:N])):
        given = vector(seed=step)
        want = plain.aggregate(given)
        np.testing.assert_array_equal(of_tensors.aggregate(torch.from_numpy(given.copy())).numpy(), want)
        result = shaped.aggregate(given.reshape(3, 13, -1))
        assert result.shape == (3, 13, N // 39)
        np.testing.assert_array_equal(result.reshape(-1), want)
        assert placed.aggregate(given, out) is out
        np.testing.assert_array_equal(out, want)
        given.flags.writeable = False
        np.testing.assert_array_equal(read_only.aggregate(given), want)


def test_read_only_and_unaligned_vectors_reach_the_kernels_like_all_others(comm: Communicator) -> None:
    """Numba compiles forms of its own for them, which takes up to a minute within the call."""
    views, plain = start(Dense(), comm).views, vector()
    read_only = np.frombuffer(plain.tobytes(), np.float32)
    unaligned = np.zeros(4 * N + 1, np.uint8)[1:].view(np.float32)
    unaligned[:] = plain
    assert views.are_plain(plain, np.empty_like(plain))
    for given in (read_only, unaligned):
        assert not views.are_plain(given, np.empty_like(plain))
        source, _, _ = views.of(given, None)
        assert source.values.flags.behaved
        np.testing.assert_array_equal(source.values, plain)
        assert np.shares_memory(source.values, given) == (given is read_only)


@every_method
def test_one_rank_sends_nothing_and_calls_are_counted(method: Any, comm: Communicator) -> None:
    aggregator = start(method, comm)
    for _ in range(3):
        aggregator.aggregate(vector())
    assert (aggregator.traffic.last.calls, aggregator.traffic.total.calls) == (1, 3)
    assert (aggregator.traffic.total.bytes_sent, aggregator.traffic.total.messages) == (0, 0)


@pytest.mark.parametrize("topology", ["ring", "segmented-ring", "torus", "tree", "double-tree", "star"])
def test_topologies_of_one_rank_give_the_same(topology: str, comm: Communicator) -> None:
    with Communicator(comm.mpi_comm, topology) as other:
        for method in METHODS.values():
            if isinstance(method, CascadingSSDM):
                continue  # it has a norm for each chunk of the topology
            ours, theirs = start(method, comm), start(method, other)
            for step in range(3):
                given = vector(seed=step)
                np.testing.assert_array_equal(ours.aggregate(given), theirs.aggregate(given))


def array(name: str, dtype: str) -> Any:
    """N elements, in a library that has the type."""
    if name == "torch":
        return torch.linspace(1, 2, N, dtype=torch.float64).to(getattr(torch, dtype))
    return np.linspace(1, 2, N).astype(dtype)


OTHERS = [("numpy", name) for name in ("float16", "float32", "float64", "longdouble", "uint16", "int64", ">f2")]
OTHERS += [("torch", name) for name in (*DTYPES, "int16", "uint16")]


@pytest.mark.parametrize("method", [Dense(), Marsit()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", OTHERS, ids=" ".join)
def test_a_vector_or_out_of_another_type_is_refused(
    method: Any, dtype: str, other: tuple[str, str], comm: Communicator
) -> None:
    aggregator, odd, good = start(method, comm, N, dtype), array(*other), array("torch", dtype)
    if other[1] == dtype:
        want = start(method, comm, N, dtype).aggregate(good)
        assert aggregator.aggregate(good, odd) is odd
        assert (torch.as_tensor(odd) == want).all()
        return
    refused = "was started for|cannot reduce elements of type"
    with pytest.raises(TypeError, match=refused):
        aggregator.aggregate(odd)
    before = odd.copy() if other[0] == "numpy" else odd.clone()
    with pytest.raises(TypeError, match=refused):
        aggregator.begin(good, odd)
    assert (odd == before).all()


BAD_VECTORS = {
    "integers": (np.zeros(N, np.int64), TypeError, "elements of type int64: convert"),
    "another float type": (np.zeros(N), TypeError, "has type float64, the aggregator was started for float32"),
    "byte-swapped": (np.zeros(N, ">f4"), TypeError, "byte-swapped float32"),
    "a list": ([0.0] * N, TypeError, "cannot reduce list: pass a NumPy array"),
    "a tensor that requires grad": (torch.zeros(N, requires_grad=True), TypeError, r"pass tensor\.detach\(\)"),
    "every other element": (np.zeros(2 * N, np.float32)[::2], ValueError, "not contiguous .*: pass a contiguous copy"),
    "a transposed tensor": (torch.zeros(2, N).t()[: N // 2], ValueError, "not contiguous"),
    "one element less": (np.zeros(N - 1, np.float32), ValueError, f"has {N - 1} elements, .* for {N}"),
    "one element more": (torch.zeros(N + 1), ValueError, f"has {N + 1} elements, .* for {N}"),
}


@every_method
def test_bad_vectors_are_refused_and_the_aggregator_goes_on_as_if_they_had_not_been(
    method: Any, comm: Communicator
) -> None:
    tried, untried, good = start(method, comm), start(method, comm), np.zeros(N, np.float32)
    for step, (name, (bad, error, message)) in enumerate(BAD_VECTORS.items()):
        with pytest.raises(error, match=f"rank 0 of 1, vector 0: .*{message}"):
            tried.aggregate(bad)
        if name != "a list":
            with pytest.raises(error, match=f"rank 0 of 1, vector 0: .*{message}"):
                tried.aggregate(good, bad)
        np.testing.assert_array_equal(tried.aggregate(vector(seed=step)), untried.aggregate(vector(seed=step)))
    memory, constant = np.zeros(N + 1, np.float32), np.zeros(N, np.float32)
    for out in (memory[:N], memory[1:]):
        with pytest.raises(ValueError, match="out shares memory with the vector: pass another array"):
            tried.aggregate(memory[:N], out)
    constant.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        tried.aggregate(good, constant)
    assert tried.traffic.total.calls == untried.traffic.total.calls


def test_an_aggregator_and_its_handle_show_method_vector_and_progress(comm: Communicator) -> None:
    aggregator = start(Marsit(full_precision_every=10), comm, 64)
    shown = "<Aggregator by Marsit(full_precision_every=10) of float32[64], rank 0 of 1: "
    assert repr(aggregator) == f"{shown}0 steps done>"
    handle = aggregator.begin(np.ones(64, np.float32))
    handle.wait()
    assert repr(handle) == "<Handle of aggregate by Marsit of float32[64], step 0, rank 0 of 1: done>"
    assert repr(aggregator) == f"{shown}1 step done>"
    with pytest.raises(NonFiniteGradient):
        aggregator.aggregate(np.full(64, np.nan, np.float32))
    assert repr(aggregator).startswith(f"{shown}1 step done, unusable: an earlier step met NaN")
