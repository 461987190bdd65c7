"""What Marsit's residual does, and how its gamma follows what of the residual is clipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GAMMA = 4.0
RATE, CLIPPED, LEAST, MOST = 0.2, 0.015, 0.25, 16.0


@dataclass(frozen=True)
class SignRule:
    """See `mpicomp.Marsit` for the options of these names."""

    global_step: float | Literal["auto"]
    residual: Literal["own", "paper"] | None
    clip: float
    gamma: float | Literal["auto"]
    transactional: bool = False

    @property
    def first_gamma(self) -> float:
        """Of the first step."""
        return GAMMA if self.gamma == "auto" else self.gamma

    def next_gamma(self, gamma: float, clipped_fraction: float) -> float:
        """Gamma after a step of which so much of the residual, over all ranks, was clipped."""
        if self.gamma != "auto" or self.residual != "own":
            return gamma
        return min(MOST, max(LEAST, gamma * math.exp(RATE * (clipped_fraction - CLIPPED))))
