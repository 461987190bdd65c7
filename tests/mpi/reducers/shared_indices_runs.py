"""What the tests of ScaleCom, random-k and true top-k share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import RandomK, ScaleCom, TrueTopK
from mpicomp.algorithms import scalecom
from mpicomp.reducers import shared_indices
from tests.reference.one_process.shared_indices import Options

N = 3001
STEPS = 20

METHODS: dict[str, Options] = {
    "scalecom": ScaleCom(rate=10),
    "several of a chunk": ScaleCom(rate=10, chunk=70, warmup_steps=2),
    "low-pass": ScaleCom(rate=25, beta=0.3),
    "exact": ScaleCom(rate=50, exact=True),
    "random-k": RandomK(rate=7, seed=5),
    "random-k, low-pass": RandomK(rate=20, beta=0.5, warmup_steps=1),
    "true top-k": TrueTopK(rate=10, chunk=40),
    "true top-k, exact": TrueTopK(rate=30, exact=True, beta=0.7),
}
every_method = pytest.mark.parametrize("kind", METHODS)


@pytest.fixture(params=["brief", "in parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Short vectors go at once, long ones in parts and beside other work."""
    if request.param == "in parts":
        for module in (shared_indices, scalecom):
            monkeypatch.setattr(module, "BRIEF_ELEMENTS", 0)
        monkeypatch.setattr(shared_indices, "PART_ELEMENTS", 500)
    return request.param


@cache
def gradients(size: int, step: int, n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    """One row a rank: something in common, much noise, ties and zeros."""
    rng = np.random.default_rng([size, step])
    rows = rng.standard_normal((size, n)) + 2 * rng.standard_normal(n)
    rows[:, ::5] = np.round(rows[:, ::5])
    rows[:, 700:800] = 0
    rows = rows.astype(dtype)
    rows.flags.writeable = False
    return rows
