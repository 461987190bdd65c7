"""A step begun with `keeps` writes a second buffer, and can be taken back; another one writes in place."""

from __future__ import annotations

import numpy as np
import pytest

from collectives.annotations import Array
from mpicomp.feedback.in_place_residual import InPlaceResidual
from mpicomp.spaces import HOST

PENDING = 0.25


def subtract(residual: Array) -> None:
    residual -= PENDING


def made(lazy: bool, keeps: bool) -> InPlaceResidual:
    found = InPlaceResidual(HOST, 4, np.float32, 1, lazy=lazy, keeps=keeps)
    found.current[:], found.pending[:] = 1.0, PENDING
    return found


def step(residual: InPlaceResidual, value: float, keeps: bool) -> None:
    residual.begin(keeps, subtract)
    residual.following[:] = value
    residual.pending[:] = PENDING


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_kept_step_is_taken_back_before_and_after_it_was_committed(lazy: bool, allocated: bool) -> None:
    before = 1.0 - PENDING * lazy
    for is_committed in (False, True):
        residual = made(lazy, allocated)
        step(residual, 2.0, keeps=True)
        if is_committed:
            residual.commit()
            assert residual.to_host().tolist() == [2.0] * 4
            residual.undo()
        else:
            residual.roll_back()
        assert residual.to_host().tolist() == [before] * 4
        assert residual.pending.tolist() == [0.0]
        step(residual, 3.0, keeps=True)
        residual.commit()
        assert residual.copy_settled(subtract).tolist() == [3.0 - PENDING * lazy] * 4


def test_another_step_writes_in_place() -> None:
    residual = made(lazy=True, keeps=True)
    step(residual, 2.0, keeps=True)
    residual.commit()
    buffer = residual.current
    step(residual, 3.0, keeps=False)
    residual.commit()
    assert residual.current is buffer
    assert residual.to_host().tolist() == [3.0] * 4


def test_a_restored_residual_is_sound_and_has_nothing_pending() -> None:
    residual = made(lazy=True, keeps=False)
    residual.spoiled = True
    residual.restore(np.arange(4, dtype=np.float32))
    assert not residual.spoiled
    assert residual.pending.tolist() == [0.0]
    assert residual.copy_settled(subtract).tolist() == [-PENDING, 1 - PENDING, 2 - PENDING, 3 - PENDING]
