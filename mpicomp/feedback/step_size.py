"""Marsit's global step: s of each tensor follows the running mean of |u|, and gamma the clipped residual elements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from collectives.annotations import AnyArray, Doubles, Indices
from collectives.arrays.elements import NARROW, narrow, round_in_place
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED
from mpicomp.feedback.base import compute_type

AVERAGE = 0.9  # of the magnitudes' running mean
GAMMA = 4.0
RATE, CLIPPED, LEAST, MOST = 0.2, 0.015, 0.25, 16.0


@dataclass(frozen=True)
class SignRule:
    """Options of `mpicomp.Marsit` that its feedback needs, by their names there."""

    global_step: float | Literal["auto"]
    residual: Literal["own", "paper"] | None
    clip: float
    gamma: float | Literal["auto"]
    transactional: bool = False

    @property
    def first_gamma(self) -> float:
        """Gamma of the first step."""
        return GAMMA if self.gamma == "auto" else self.gamma

    def next_gamma(self, gamma: float, clipped_fraction: float) -> float:
        """Return gamma after a step in which a fraction of the residual, over all ranks, was clipped."""
        if self.gamma != "auto" or self.residual != "own":
            return gamma
        return min(MOST, max(LEAST, gamma * math.exp(RATE * (clipped_fraction - CLIPPED))))


class Snapshot(NamedTuple):
    """Scales of before a step."""

    magnitudes: Doubles
    gamma: float


class StepSize:
    """The global step of each tensor of a vector; equal on all ranks to the bit.

    Parameters
    ----------
    rule : SignRule
    dtype : str
        Of the vector.
    ranks : int
    lengths : int64[tensors]
        Elements of each tensor.

    Attributes
    ----------
    gamma : float
    magnitudes : float64[tensors]
        Running mean of |u|; NaN: the tensor has not been seen yet.
    clipped_fraction : float
        Of the residual's elements over all ranks, at the last step.
    steps, limits : array[tensors] in the type of computing
        s of this step, and the bound of the residual.
    positive, negative : unsigned words[tensors]
        s and -s in the result's type.
    """

    def __init__(self, rule: SignRule, dtype: str, ranks: int, lengths: Indices) -> None:
        self.rule, self.lengths, self._dtype, self._kernels = rule, lengths, dtype, kernels.of("cpu").sign_steps
        self.gamma, self.clipped_fraction = rule.first_gamma, 0.0
        count, kind = lengths.size, compute_type(dtype)
        self.magnitudes = np.full(count, np.nan)
        self.steps, self._minus_steps, self.limits = (np.zeros(count, kind) for _ in range(3))
        self._elements = max(1, int(lengths.sum()) * ranks)
        self._counts = np.maximum(1.0, lengths * ranks)
        if rule.global_step != "auto" and not self._scale(np.full(count, float(rule.global_step)), 1.0):
            raise ValueError(f"global_step={rule.global_step} is beyond what {np.dtype(kind)} holds")
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        words, self._narrow = UNSIGNED[stored.itemsize], dtype in NARROW
        self._rounded = [np.zeros(count, stored) for _ in range(2)] if self._narrow else [self.steps, self._minus_steps]
        self.positive, self.negative = (one.view(words) for one in self._rounded)

    def snapshot(self) -> Snapshot:
        """Return a copy of the scales."""
        return Snapshot(self.magnitudes.copy(), self.gamma)

    def restore(self, before: Snapshot) -> None:
        """Go back to scales of before."""
        self.magnitudes, self.gamma = before

    @property
    def is_unknown(self) -> bool:
        """True if the ranks' magnitudes must be known before the first step."""
        return self.rule.global_step == "auto" and math.isnan(self.magnitudes[0])

    def fix(self) -> bool:
        """Fix s of each tensor for this step; returns whether all are finite."""
        finite = True
        if self.rule.global_step == "auto":
            finite = self._scale(self.magnitudes, self.gamma)
        if self._narrow:
            steps, minus_steps = self._rounded
            narrow(self._minus_steps, self._dtype, minus_steps)
            # the residual is the part that the result misses, so it must see s, and limits, as rounded there
            round_in_place(self.steps, self._dtype, steps)
            finite = self._scale(self.steps.astype(np.float64), 1.0)
        return finite

    def _scale(self, magnitudes: Doubles, gamma: float) -> bool:
        scaled = magnitudes, gamma, self.rule.clip, self.steps, self._minus_steps, self.limits
        return bool(self._kernels.set_steps(*scaled))

    def follow(self, reports: Doubles) -> bool:
        """Take in the ranks' reports, in rank order; returns whether all are finite."""
        clipped = self._kernels.follow(reports, self._counts, AVERAGE, self.magnitudes)
        if math.isnan(clipped):
            return False
        self.clipped_fraction = clipped / self._elements
        return True

    def adapt(self) -> None:
        """Let an automatic gamma follow the fraction that was clipped."""
        self.gamma = self.rule.next_gamma(self.gamma, self.clipped_fraction)

    def load(self, state: Mapping[str, AnyArray]) -> str:
        """Take over "gamma" and "magnitudes"; returns a description that ranks compare.

        Their steps must stay the same to the bit.
        """
        self.magnitudes = state["magnitudes"].copy()
        if self.rule.gamma == "auto":
            self.gamma = float(state["gamma"])
        digest = hashlib.blake2b(self.magnitudes.tobytes(), digest_size=8).hexdigest()
        return f"gamma {self.gamma!r} and magnitudes {digest}"
