"""Marsit on one rank, where the vote is this rank's own, one step at a time in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]


class OneRankMarsit:
    """Residual and step counter of one vector; the global step is handed in."""

    def __init__(self, n: int, dtype: Any, residual: str, every: int | None, clip: float = 1.0) -> None:
        self.c: Vector = np.zeros(n, dtype)
        self.rule, self.every, self.clip, self.t = residual, every, clip, 0
        self.clipped = 0

    def aggregate(self, u: Vector, s: Any) -> Vector:
        """One step's result; `s` is a scalar, or one for each element, of u's type."""
        w = u + self.c
        full = self.every is not None and self.t % self.every == 0
        self.t += 1
        self.clipped = 0
        if full:
            self.c = np.zeros_like(w)
            return w
        g = np.where(w >= 0, s, -s)
        missed = w - g
        if self.rule == "own":
            limit = s * u.dtype.type(self.clip)
            self.clipped = int((np.abs(missed) > limit).sum())
            missed = np.clip(missed, -limit, limit)
        self.c = missed
        return g
