"""EF21: estimates, their mean, the optimum of ranks whose data differ, other ranks, and refused compressors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp import EF21, CollectiveMismatch, Communicator, Dense, LocalTopK, redistribute, run_local
from mpicomp.codecs import COMPRESSORS, OneBit, Quantizer, compressor
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.codecs.random_sparsification import RandomSparsification
from tests.exact import Trial, gradient

N = 1003
BOTH = pytest.mark.parametrize("both_ways", [False, True], ids=["gathered", "both ways"])


def started(comm: Communicator, method: EF21, dtype: str = "float32", steps: int = 4) -> Any:
    """Return an aggregator after some steps."""
    ef21, trial = method.start(comm, N, dtype=dtype), Trial(method, N, dtype=dtype)
    for step in range(steps):
        ef21.aggregate(trial.given(comm.rank, step))
    return ef21


@BOTH
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_common_estimate_stays_the_mean_of_the_ranks_estimates(both_ways: bool, dtype: str) -> None:
    """Also of 16-bit vectors: a first mean of 16 bits would leave its rounding in all later results."""
    method = EF21("top-k:rate=10", both_ways=both_ways)
    for steps in (1, 5):
        states = run_local(3, lambda comm, steps=steps: started(comm, method, dtype, steps).state_dict())
        mean = np.mean([state["estimate"] for state in states], axis=0, dtype=np.float64)
        pending = sum(state.get("owner_distance", 0) for state in states)
        bound = 1e-5 if states[0]["common"].dtype == np.float32 else 1e-14
        for state in states:
            np.testing.assert_allclose(state["common"] + pending, mean, atol=bound)


@BOTH
def test_without_compression_it_averages_the_mean_gradient_exponentially(both_ways: bool) -> None:
    method = EF21(FullPrecision("float64"), eta=0.25, both_ways=both_ways)

    def train(comm: Communicator) -> list[Any]:
        ef21 = method.start(comm, N, dtype="float64")
        return [ef21.aggregate(gradient(comm.rank, step, N, "float64")).copy() for step in range(5)]

    average = np.zeros(N)
    for step, result in enumerate(run_local(3, train)[0]):
        mean = np.mean([gradient(rank, step, N, "float64") for rank in range(3)], axis=0)
        average = mean if step == 0 else 0.75 * average + 0.25 * mean
        np.testing.assert_allclose(result, average, atol=1e-13)


@BOTH
def test_ranks_with_different_optima_find_the_common_one(both_ways: bool) -> None:
    """Error feedback stops at a distance from it: errors of gradients that cancel in the mean are sent one by one."""

    def distance(comm: Communicator, method: Any) -> float:
        optima = np.random.default_rng(0).standard_normal((comm.size, 64))
        aggregator, x = method.start(comm, 64, dtype="float64"), np.zeros(64)
        for _ in range(600):
            x = x - 0.05 * aggregator.aggregate(x - optima[comm.rank])
        return float(np.linalg.norm(x - optima.mean(0)))

    ef21 = EF21("top-k:rate=16,double=True", eta=1.0, both_ways=both_ways)
    assert run_local(4, lambda comm: distance(comm, ef21))[0] < 1e-6
    assert run_local(4, lambda comm: distance(comm, LocalTopK(16)))[0] > 0.1


@BOTH
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_other_ranks_send_their_momenta_in_full_once(both_ways: bool, ranks: int) -> None:
    method = EF21("top-k:rate=10", eta=0.5, both_ways=both_ways)

    def save(comm: Communicator) -> Any:
        ef21 = started(comm, method)
        return ef21.state_dict(), ef21.state_kinds

    states, kinds = zip(*run_local(3, save), strict=True)
    momentum = np.mean([state["momentum"] for state in states], axis=0, dtype=np.float64)

    def resume(comm: Communicator) -> Any:
        ef21 = started(comm, method, steps=3)  # a past of its own, which the state replaces
        ef21.load_state_dict(redistribute(states, comm.size, kinds[0])[comm.rank])
        result = ef21.aggregate(gradient(comm.rank, 4, N)).copy()
        first = ef21.state_dict()
        ef21.aggregate(gradient(comm.rank, 5, N))
        return result, first, ef21.state_dict()

    mean = np.mean([gradient(rank, 4, N) for rank in range(ranks)], axis=0, dtype=np.float64)
    found = run_local(ranks, resume)
    for result, state, later in found:
        np.testing.assert_allclose(result, 0.5 * momentum + 0.5 * mean, atol=1e-6)
        np.testing.assert_array_equal(state["estimate"], state["momentum"])
        assert not np.any(state.get("owner_distance", 0))
        assert np.any(later["estimate"] != later["momentum"])  # the next step is compressed


def test_as_many_ranks_go_on_compressed_from_merged_states() -> None:
    method = EF21("top-k:rate=10")

    def save(comm: Communicator) -> Any:
        ef21 = started(comm, method)
        return ef21.state_dict(), ef21.state_kinds

    states, kinds = zip(*run_local(3, save), strict=True)

    def resume(comm: Communicator) -> Any:
        ef21 = method.start(comm, N)
        ef21.load_state_dict(redistribute(states, comm.size, kinds[0])[comm.rank])
        ef21.aggregate(gradient(comm.rank, 4, N))
        return ef21.state_dict()

    after = run_local(3, resume)
    mean = np.mean([state["estimate"] for state in after], axis=0, dtype=np.float64)
    np.testing.assert_allclose(after[0]["common"], mean, atol=1e-5)
    assert np.any(after[0]["estimate"] != after[0]["momentum"])


def test_ranks_that_load_states_of_different_steps_raise_one_error() -> None:
    def load(comm: Communicator) -> None:
        ef21, other = started(comm, EF21()), started(comm, EF21(), steps=3)
        state = (ef21 if comm.rank else other).state_dict()
        ef21.load_state_dict({**state, "step": 4})
        with pytest.raises(CollectiveMismatch, match="mean of estimates"):
            ef21.aggregate(gradient(comm.rank, 4, N))

    run_local(2, load)


def test_the_residual_is_the_distance_to_the_estimate_and_undo_restores_it() -> None:
    def step(comm: Communicator) -> None:
        ef21 = started(comm, EF21("top-k:rate=10"))
        before, state = ef21.residual.copy(), ef21.state_dict()
        np.testing.assert_array_equal(before, state["momentum"] - state["estimate"])
        result = ef21.aggregate(gradient(comm.rank, 9, N)).copy()
        ef21.undo()
        np.testing.assert_array_equal(ef21.residual, before)
        np.testing.assert_array_equal(ef21.aggregate(gradient(comm.rank, 9, N)), result)

    run_local(2, step)


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_compressors_are_taken_if_their_error_is_shorter_than_their_input(name: str) -> None:
    if name in ("clip", "levels", "top-k", "two-means"):
        assert EF21(name).compressor == compressor(name)
    else:
        with pytest.raises(ValueError, match=r"compressor must be a codec whose error is shorter .* not \w+\("):
            EF21(name)


@pytest.mark.parametrize(
    ("taken", "refused"),
    [
        (OneBit(scale="l1"), OneBit(scale="l2")),
        (Quantizer(128, 4), Quantizer(129, 4)),
        (Quantizer(63, 4, "l2"), Quantizer(64, 4, "l2")),
        (RandomSparsification(0.51), RandomSparsification(0.5)),
        (compressor("ternary:bucket=48"), compressor("ternary:bucket=49")),
    ],
    ids=str,
)
def test_options_decide_which_codecs_contract(taken: Any, refused: Any) -> None:
    assert EF21(taken).compressor == taken
    with pytest.raises(ValueError, match="error is shorter"):
        EF21(refused)


@pytest.mark.parametrize("eta", [0, 1.5, -0.1, float("nan"), "0.1", True])
def test_the_weight_of_a_gradient_is_above_0_and_at_most_1(eta: Any) -> None:
    with pytest.raises(ValueError, match="eta must be above 0 and at most 1"):
        EF21(eta=eta)


@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "in hooks"])
def test_optimizers_average_gradients_by_it_during_backward_too(overlap: bool) -> None:
    """With all elements sent and eta = 1 it is the exact mean."""
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("mpicomp.torch")

    def train(comm: Communicator, method: Any) -> Any:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, N))
        sgd = torch.optim.SGD([weight], lr=0.1)
        optimizer = distributed.DistributedOptimizer(sgd, method, comm, overlap=overlap)
        for step in range(4):
            optimizer.zero_grad()
            (weight * torch.tensor(gradient(comm.rank, step, N))).sum().backward()
            optimizer.step()
        return weight.detach().numpy()

    exact = run_local(2, lambda comm: train(comm, Dense()))[0]
    found = run_local(2, lambda comm: train(comm, EF21("top-k:rate=1", eta=1.0)))
    np.testing.assert_allclose(found[0], exact, atol=1e-5)
    np.testing.assert_array_equal(found[0], found[1])
