"""The learning rate as a pure function of the step, so that a checkpoint need not hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAYS = ("none", "cosine", "step")


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then a decay.

    Parameters
    ----------
    peak
        Learning rate after the warm-up.
    n_steps
        Steps of the whole run, after which the cosine is zero.
    warmup_steps
        Steps of the warm-up; the first has ``peak / (warmup_steps + 1)``.
    decay
        "none", "cosine", or "step": the rate is multiplied by `factor` at each step of `milestones`.
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
