"""Momentum of each rank in ScaleCom and local top-k: its sums, and the elements that masking clears."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp import Auto, Communicator, LocalTopK, ScaleCom, redistribute, run_local
from tests.exact import gradient

N = 203
METHODS = pytest.mark.parametrize("made", [ScaleCom, LocalTopK])


@METHODS
def test_with_all_elements_sent_it_is_momentum_before_the_mean(made: Any) -> None:
    def train(comm: Communicator) -> list[Any]:
        method = made(rate=1, momentum=0.9).start(comm, N, dtype="float64")
        return [method.aggregate(gradient(comm.rank, step, N, "float64")).copy() for step in range(5)]

    momentum = np.zeros(N)
    for step, result in enumerate(run_local(3, train)[0]):
        momentum = 0.9 * momentum + np.mean([gradient(rank, step, N, "float64") for rank in range(3)], axis=0)
        np.testing.assert_allclose(result, momentum, atol=1e-13)


@METHODS
@pytest.mark.parametrize("masking", [False, True], ids=["kept", "masked"])
def test_an_element_that_was_sent_moves_the_model_again_only_if_its_momentum_is_kept(made: Any, masking: bool) -> None:
    def train(comm: Communicator) -> list[float]:
        method = made(rate=2, momentum=0.5, masking=masking).start(comm, 4)
        pulse, nothing = np.array([8, 1, 0, 0], np.float32), np.zeros(4, np.float32)
        return [float(method.aggregate(one)[0]) for one in (pulse, nothing, nothing, nothing)]

    # the second element, which waits with 1 + 0.5, takes its turn where the first one is cleared
    assert run_local(2, train)[0] == ([8, 0, 0, 0] if masking else [8, 4, 2, 0])


@pytest.mark.parametrize("masking", [False, True], ids=["kept", "masked"])
def test_what_is_not_sent_stays_in_the_residual(masking: bool) -> None:
    """After each step, mean residual + result = mean (residual before + momentum)."""

    def train(comm: Communicator) -> list[Any]:
        scalecom = ScaleCom(rate=10, momentum=0.9, masking=masking).start(comm, N, dtype="float64")
        momentum, found = np.zeros(N), []
        for step in range(6):
            before = scalecom.residual.copy()
            momentum = 0.9 * momentum + gradient(comm.rank, step, N, "float64")
            result = scalecom.aggregate(gradient(comm.rank, step, N, "float64")).copy()
            found.append((before + momentum, scalecom.residual.copy(), result))
            if masking:
                momentum[scalecom.feedback.places] = 0
            np.testing.assert_allclose(scalecom.state_dict()["momentum"], momentum, atol=1e-13)
        return found

    for of_ranks in zip(*run_local(3, train), strict=True):
        given, residuals, results = (np.stack(one) for one in zip(*of_ranks, strict=True))
        np.testing.assert_allclose(residuals.mean(0) + results[0], given.mean(0), atol=1e-12)


@METHODS
def test_momentum_is_no_pending_error_and_other_ranks_go_on_from_its_mean(made: Any) -> None:
    method = made(rate=10, momentum=0.9, masking=True)

    def save(comm: Communicator) -> Any:
        aggregator = method.start(comm, N)
        aggregator.aggregate(gradient(comm.rank, 0, N))
        assert aggregator.feedback.pending_keys == {"residual"}
        return aggregator.state_dict(), aggregator.state_kinds

    states, kinds = zip(*run_local(3, save), strict=True)
    for state in redistribute(states, 2, kinds[0]):
        np.testing.assert_allclose(state["momentum"], np.mean([one["momentum"] for one in states], axis=0), atol=1e-6)


@METHODS
def test_without_momentum_a_state_has_none(made: Any) -> None:
    with Communicator() as comm:
        assert set(made(rate=10).start(comm, N).state_kinds) == {"method", "n", "step", "residual"}


@METHODS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masking": True}, "masking=True needs a momentum"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum must be at least 0 and below 1"),
        ({"momentum": 0.9, "masking": 1}, "masking must be True or False"),
    ],
)
def test_wrong_options_are_refused(made: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**options)


def test_momentum_and_dense_steps_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="warmup_steps must be 0 with momentum"):
        ScaleCom(momentum=0.9, warmup_steps=2)
    with pytest.raises(ValueError, match="estimates of the mean"):
        Auto(ScaleCom(momentum=0.9))
