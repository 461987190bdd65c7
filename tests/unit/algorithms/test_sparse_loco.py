"""SparseLoCo on ranks that are threads: the law of its residual, its limits, and its options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp import Auto, Communicator, NonFiniteGradient, SparseLoCo, run_local

N = 9000
LENGTHS = (4096 + 65, 1, 700, N - 4096 - 128 - 64 - 704)

PADDING = ((4096 + 65, 4096 + 128), (4096 + 129, 4096 + 192), (4096 + 892, 4096 + 896))


def vector(rank: int, step: int = 0, n: int = N, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((rank, step)).standard_normal(n).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [2, 32])
def test_every_step_keeps_decayed_residual_plus_vector(bits: Any, dtype: type, comm: Communicator) -> None:
    """decay e + u = v + e', where v is the result of a single rank."""
    aggregator = SparseLoCo(bits=bits, decay=0.9).start(comm, N, dtype=dtype)
    for step in range(6):
        u, before = vector(0, step, dtype=dtype), aggregator.state_dict()["residual"]
        p = dtype(0.9) * before + u
        v = aggregator.aggregate(u)
        after = aggregator.state_dict()["residual"]
        np.testing.assert_array_equal(after, p - v)
        assert np.count_nonzero(v) == 2 * 64 + 13
        rounding = np.finfo(dtype).eps * np.maximum(np.abs(p), np.abs(v)).astype(np.float64)
        assert (np.abs(v.astype(np.float64) + after - p.astype(np.float64)) <= rounding).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("topology", ["ring", "star", "auto"])
def test_sending_all_elements_in_float32_is_the_mean(ranks: int, topology: str) -> None:
    def work(comm: Communicator) -> None:
        aggregator = SparseLoCo(rate=1, bits=32, decay=1.0).start(comm, N, tensor_lengths=LENGTHS)
        for step in range(3):
            # sums of whole numbers do not depend on their order
            u = np.round(1000 * vector(comm.rank, step))
            for start, stop in PADDING:
                u[start:stop] = 0
            np.testing.assert_array_equal(aggregator.aggregate(u), comm.allreduce(u, "mean"))
            assert not aggregator.residual.any()

    run_local(ranks, work, topology)


@pytest.mark.parametrize("bits", [2, 32])
def test_the_order_of_the_ranks_does_not_matter(bits: Any) -> None:
    def work(comm: Communicator, order: tuple[int, ...]) -> Any:
        aggregator = SparseLoCo(bits=bits).start(comm, N)
        return [aggregator.aggregate(vector(order[comm.rank], step)) for step in range(3)]

    first, *others = (
        run_local(3, lambda comm, order=order: work(comm, order))[0] for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2))
    )
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine != 0, theirs != 0)
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)  # as sums of three numbers are


def test_a_residual_is_lost_without_new_vectors_at_the_rate_of_the_decay(comm: Communicator) -> None:
    aggregator = SparseLoCo(decay=0.5, bits=32).start(comm, 4096)
    aggregator.aggregate(vector(0, n=4096))
    pending = np.sort(np.abs(aggregator.state_dict()["residual"]))
    aggregator.aggregate(np.zeros(4096, np.float32))
    np.testing.assert_array_equal(np.sort(np.abs(aggregator.residual))[128:], pending[128 - 64 : -64] / 2)


def test_without_a_residual_every_step_is_the_first(comm: Communicator) -> None:
    aggregator = SparseLoCo(decay=0.0).start(comm, N)
    first = aggregator.aggregate(vector(0))
    np.testing.assert_array_equal(aggregator.aggregate(vector(0)), first)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_alpha_scales_the_result_and_nothing_else(dtype: str) -> None:
    def work(comm: Communicator) -> None:
        whole, half = (SparseLoCo(alpha=alpha).start(comm, N, dtype=dtype) for alpha in (1.0, 0.5))
        for step in range(3):
            u = vector(comm.rank, step, dtype=dtype)
            np.testing.assert_array_equal(whole.aggregate(u) / 2, half.aggregate(u))
            np.testing.assert_array_equal(whole.residual, half.residual)

    run_local(2, work)


def test_a_step_can_be_taken_back(comm: Communicator) -> None:
    aggregator = SparseLoCo().start(comm, N)
    aggregator.aggregate(vector(0))
    before, first = aggregator.state_dict(), aggregator.aggregate(vector(0, 1))
    aggregator.undo()
    np.testing.assert_array_equal(aggregator.residual, before["residual"])
    np.testing.assert_array_equal(aggregator.aggregate(vector(0, 1)), first)


def test_devices_are_refused_as_by_other_methods_that_encode_on_the_host(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"SparseLoCo.*encode"):
        SparseLoCo().start(comm, N, device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate must be an integer of 1 to 2\\^32, not 0"),
        ({"rate": 100}, "chunk must be a multiple of rate, 100, not 4096"),
        ({"chunk": 0}, "chunk must be an integer of 1 to 2\\^32, not 0"),
        ({"bits": 4}, "bits must be 2 or 32, not 4"),
        ({"decay": 1.5}, "decay must be between 0 and 1, not 1.5"),
        ({"decay": float("nan")}, "decay must be between 0 and 1, not nan"),
        ({"alpha": 0}, "alpha must be a positive number that float32 represents, not 0"),
        ({"alpha": 1e39}, "alpha must be a positive number that float32 represents, not 1e\\+39"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseLoCo(**options)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_an_overflow_by_alpha_is_no_ranks_fault_and_changes_nothing() -> None:
    def work(comm: Communicator) -> Any:
        aggregator = SparseLoCo(rate=1, bits=32, alpha=4.0).start(comm, 256)
        before = aggregator.state_dict()["residual"]
        with pytest.raises(NonFiniteGradient) as caught:
            aggregator.aggregate(np.full(256, 1e38, np.float32))
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], before)
        return caught.value.ranks

    assert run_local(2, work) == [(), ()]


def test_a_residual_beyond_float32_fails_the_step_that_makes_it(comm: Communicator) -> None:
    aggregator = SparseLoCo(rate=1, decay=1.0).start(comm, 4096)
    values = np.repeat(np.float32([-3.3e38, -0.3e38]), 2048)
    values[100] = 3.3e38
    with pytest.raises(NonFiniteGradient):
        aggregator.aggregate(values)
    assert not aggregator.state_dict()["residual"].any()


def test_in_float64_alpha_is_not_rounded_to_float32(comm: Communicator) -> None:
    aggregator = SparseLoCo(rate=1, bits=32, decay=1.0, alpha=0.7).start(comm, 64, dtype="float64")
    np.testing.assert_array_equal(aggregator.aggregate(np.ones(64)), np.full(64, 0.7))


def test_the_papers_symbol_is_explained() -> None:
    with pytest.raises(TypeError, match="no option 'beta' \\(did you mean 'decay'\\?\\)"):
        SparseLoCo(beta=0.9)  # type: ignore[call-arg]


def test_auto_takes_it_only_where_its_results_estimate_the_mean() -> None:
    assert Auto(SparseLoCo(decay=1.0)).method == SparseLoCo(decay=1.0)
    for method in (SparseLoCo(), SparseLoCo(decay=1.0, alpha=0.5)):
        with pytest.raises(ValueError, match="SparseLoCo"):
            Auto(method)


@pytest.mark.parametrize("n", [1, 64, 4096, 1_000_000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_message_model_is_what_travels(n: int, ranks: int) -> None:
    def work(comm: Communicator) -> int:
        aggregator = SparseLoCo().start(comm, n)
        aggregator.aggregate(vector(comm.rank, n=n))
        return aggregator.traffic.last.bytes_sent

    model = SparseLoCo().message_model(n, "float32", ranks, 1 << 20)
    assert model.piece_elements >= n
    for sent in run_local(ranks, work, "ring"):
        assert 0 <= sent - (ranks - 1) * model.nbytes(n, 1) <= 8 * (ranks - 1) + 64  # flags, and the check of the call
