"""The learning rate as a pure function of the step, so that a checkpoint need not hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAYS = ("none", "cosine", "step")


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then a decay.

    The first step of the warm-up has ``peak / (warmup_steps + 1)``. The decay "cosine" ends at zero after `n_steps`,
    the steps of the whole run; "step" multiplies the rate by `factor` at each step of `milestones`.
    """

    peak: float
    n_steps: int
    warmup_steps: int = 0
    decay: str = "none"
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.decay == "cosine":
            done = (step - self.warmup_steps) / max(1, self.n_steps - self.warmup_steps)
            return self.peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.decay == "step":
            return self.peak * self.factor ** sum(step >= milestone for milestone in self.milestones)
        return self.peak
