"""When the second moment of 1-bit Adam is frozen."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch

from mpicomp.torch.one_bit_adam.adam_moments import STABLE, VarianceFreeze


def groups(*rates: float, beta2: float = 0.75) -> list[dict[str, object]]:
    """Groups over four steps of which v forgets."""
    return [{"lr": rate, "betas": (0.9, beta2)} for rate in rates]


def frozen_after(norms: Iterable[float], rates: Iterable[float], beta2: float = 0.75) -> int | None:
    """The number of steps after which v is frozen."""
    rule = VarianceFreeze("auto")
    for step, (norm, rate) in enumerate(zip(norms, rates, strict=True), 1):
        now = groups(rate, beta2=beta2)
        rule.note(norm, now)
        if rule.due(step, now):
            return step
    return None


def test_a_number_of_steps_is_kept() -> None:
    rule = VarianceFreeze(3)
    assert not rule.watches
    assert [rule.due(steps, groups(1.0)) for steps in range(5)] == [False, False, False, True, True]


def test_v_that_stays_is_frozen_once_there_are_two_norms_so_far_apart() -> None:
    assert frozen_after([2.0] * 20, [0.1] * 20) == 5
    assert frozen_after([2.0] * 20, [0.1] * 20, beta2=0.9) == 11


def test_v_that_falls_is_frozen_when_it_falls_slowly_enough() -> None:
    fast, slow = (STABLE - 0.01) ** 0.25, (STABLE + 0.01) ** 0.25
    assert frozen_after([fast**step for step in range(30)], [0.1] * 30) is None
    norms = [fast**step for step in range(10)] + [fast**9 * slow**step for step in range(1, 11)]
    assert frozen_after(norms, [0.1] * 20) in (12, 13, 14)


def test_steps_before_the_learning_rate_stops_rising_do_not_count() -> None:
    rates = [0.1, 0.2, 0.3, 0.3, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]
    assert frozen_after([1.0] * 10, rates) == 7
    assert frozen_after([1.0] * 10, [0.1 * step for step in range(10)]) is None


def test_v_of_zeros_is_not_frozen() -> None:
    assert frozen_after([0.0] * 20, [0.1] * 20) is None


def test_a_state_goes_on_where_it_was_taken() -> None:
    rule, again = VarianceFreeze("auto"), VarianceFreeze("auto")
    for _ in range(3):
        rule.note(1.0, groups(0.1))
    state = copy.deepcopy(rule.state_dict())
    again.check_state_dict(state)
    again.load_state_dict(state)
    for one in (rule, again):
        one.note(1.0, groups(0.1))
        assert not one.due(4, groups(0.1))
        one.note(1.0, groups(0.1))
        assert one.due(5, groups(0.1))


@pytest.mark.parametrize("damage", [{"norms": [1.0]}, {"rates": 0.1}, {"rates": ["x"]}, {"norms": torch.zeros(2, 2)}])
def test_a_damaged_state_is_refused(damage: dict[str, object]) -> None:
    rule = VarianceFreeze("auto")
    with pytest.raises(ValueError, match=r"no numbers|not a list"):
        rule.check_state_dict(rule.state_dict() | damage)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "soon", None])
def test_there_must_be_steps_before(steps: object) -> None:
    with pytest.raises(ValueError, match="warmup_steps is"):
        VarianceFreeze(steps)
