"""A residual that loses much or explodes is told once; a sound one never."""

from __future__ import annotations

import re
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


LOST = r"of the residual is clipped at step 99: gamma is too small"
EXPLODED = r"rank 0: the residual is .* divergence is ahead; use residual='own'"


@pytest.mark.parametrize("every", [None, 100])  # the full-precision round that clears the residual does not hide it
@pytest.mark.parametrize(("rule", "step", "text"), [("own", 0.1, LOST), ("paper", 0.01, EXPLODED)])
def test_a_residual_that_loses_much_or_grows_is_told_once_after_a_hundred_steps(
    every: int | None, rule: Any, step: float, text: str, comm: Communicator
) -> None:
    ((at, told, file),) = warned(Marsit(every, global_step=step, residual=rule), comm, 300)
    assert (at, file) == (99, __file__)
    assert re.search(text, told)


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
