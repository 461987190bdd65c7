"""A residual that loses much or explodes is told once; a sound one never."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from mpicomp import Communicator, Marsit

N = 1000


def warned(options: Marsit, comm: Communicator, steps: int, scale: float = 1.0) -> list[tuple[int, str, Any]]:
    """Step, text and file of each warning, over normally distributed updates."""
    aggregator = options.start(comm, N)
    rng = np.random.default_rng(1)
    found = []
    for step in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            aggregator.aggregate((scale * rng.standard_normal(N)).astype(np.float32))
        found += [(step, str(w.message), w.filename) for w in caught]
        assert all(issubclass(w.category, RuntimeWarning) for w in caught)
    return found


def test_a_residual_that_is_mostly_clipped_is_told_once_after_a_hundred_steps(comm: Communicator) -> None:
    ((step, text, file),) = warned(Marsit(None, global_step=0.1), comm, 300)
    assert step == 99
    assert "of the residual is clipped at step 99: gamma is too small" in text
    assert file == __file__


def test_a_growing_paper_residual_is_told_once(comm: Communicator) -> None:
    ((step, text, file),) = warned(Marsit(None, global_step=0.01, residual="paper"), comm, 300)
    assert step == 99
    assert "rank 0: the residual is" in text
    assert "divergence is ahead; use residual='own'" in text
    assert file == __file__


def test_the_full_precision_round_that_clears_the_residual_does_not_hide_it(comm: Communicator) -> None:
    assert len(warned(Marsit(100, global_step=0.01, residual="paper"), comm, 250)) == 1
    assert len(warned(Marsit(100, global_step=0.1), comm, 250)) == 1


@pytest.mark.parametrize(
    "options",
    [
        Marsit(),
        Marsit(None),
        Marsit(None, gamma="auto"),
        Marsit(None, residual="paper"),
        Marsit(None, compensation=False, global_step=0.01),
    ],
    ids=str,
)
def test_sound_residuals_are_not_told(options: Marsit, comm: Communicator) -> None:
    for scale in (1.0, 0.0):
        assert not warned(options, comm, 250, scale)
