"""Linear models on made data, trained by several ranks that take turns in one thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from mpicomp.algorithms import ECQSGD, QSGD, Algorithm, Dense, OneBitSGD, TernGrad
from mpicomp.codecs import Draw, Quantizer
from mpicomp.codecs.base import sent_bytes
from mpicomp.kernels.streams import Stream

Values = NDArray[np.float32]
DIVERGED = 100.0
"""How many times farther from where it should go training is given up."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Samples and what made them.

    Attributes
    ----------
    x : float32[samples, features]
    y : float32[samples]
        Numbers, or classes -1 and 1.
    w : float32[features]
        That y was made with.
    loss : "squared" or "log"
    """

    x: Values
    y: Values
    w: Values
    loss: Literal["squared", "log"]

    def value(self, w: Values) -> float:
        """Mean loss over all samples."""
        scores = self.x @ w
        if self.loss == "squared":
            return float(0.5 * np.mean(np.square(scores - self.y, dtype=np.float64)))
        return float(np.mean(np.logaddexp(0, -(self.y * scores).astype(np.float64))))

    def gradient(self, w: Values, rows: NDArray[np.int64]) -> Values:
        """Of the mean loss over some samples."""
        x, y = self.x[rows], self.y[rows]
        scores = x @ w
        slope = scores - y if self.loss == "squared" else -y * expit(-y * scores)
        return (x.T @ slope / np.float32(len(rows))).astype(np.float32)


def synthetic(features: int, seed: int, samples: int = 10_000, noise: float = 1.0) -> Problem:
    """The paper's Syn: y = w x + noise; w, x and noise are standard normal."""
    rng = np.random.default_rng((seed, features, 1))
    w = rng.standard_normal(features, np.float32)
    x = rng.standard_normal((samples, features), np.float32)
    return Problem(x, x @ w + noise * rng.standard_normal(samples, np.float32), w, "squared")


def regression(seed: int, features: int = 90, samples: int = 20_000) -> Problem:
    """Correlated features of unequal scale, as measured ones are, whitened by their standard deviations."""
    rng = np.random.default_rng((seed, features, 2))
    mixing = rng.standard_normal((features, features)) / np.sqrt(features) + np.eye(features)
    x = rng.standard_normal((samples, features)) @ mixing
    x = (x / x.std(axis=0)).astype(np.float32)
    w = rng.standard_normal(features, np.float32)
    return Problem(x, x @ w + 3 * rng.standard_normal(samples, np.float32), w, "squared")


def classification(seed: int, features: int = 5000, samples: int = 4000, present: float = 0.13) -> Problem:
    """Sparse features between 0 and 1, most of them without meaning; two classes that a tenth of the features tells."""
    rng = np.random.default_rng((seed, features, 3))
    x = rng.random((samples, features), np.float32)
    x *= rng.random((samples, features), np.float32) < present
    w = np.where(rng.random(features) < 0.1, rng.standard_normal(features), 0).astype(np.float32)
    scores = (x @ w).astype(np.float64)
    scores -= np.median(scores)
    y = np.where(rng.random(samples) < expit(8 * scores / scores.std()), 1, -1).astype(np.float32)
    return Problem(x, y, w, "log")


class Together:
    """What the ranks of a method do with their gradients, one after the other in one thread.

    Codes, residuals and results are those that the method's aggregators have, to the bit; of `Dense` only as far as
    sums depend on their order.

    Parameters
    ----------
    method : Dense, QSGD, ECQSGD, TernGrad or OneBitSGD
        Of which a bucket is the whole vector.
    ranks, n : int

    Attributes
    ----------
    bits : float
        That a rank has told each other rank so far, mean over ranks; what tells of NaN left out.
    formula : float
        The same by `formula_bits`.
    """

    def __init__(self, method: Algorithm, ranks: int, n: int) -> None:
        if not isinstance(method, Dense | QSGD | ECQSGD | TernGrad | OneBitSGD):
            raise ValueError(f"the codes of {method} are not gathered")
        if not isinstance(method, Dense) and method.bucket < n:
            raise ValueError(f"{method} has buckets shorter than the vector of {n} elements")
        self.method, self.bits, self.formula, self._step = method, 0.0, 0.0, 0
        self._residuals = np.zeros((ranks, n), np.float32)

    def mean(self, gradients: Sequence[Values]) -> Values:
        """What every rank gets of all ranks' gradients; one step."""
        ranks, n = self._residuals.shape
        if isinstance(self.method, Dense):
            self.bits += 32 * n
            self.formula += formula_bits(self.method, np.empty(0, np.uint8), gradients[0])
            average: Values = np.mean(gradients, axis=0, dtype=np.float32)
            return average
        codec, shared, total = self.method.codec, None, np.zeros(n, np.float32)
        if isinstance(self.method, TernGrad):
            shared = np.max([self.method.scales(gradient) for gradient in gradients], axis=0)
        payload, sent = np.empty(codec.nbytes(n), np.uint8), np.empty(n, np.float32)
        for rank, (gradient, residual) in enumerate(zip(gradients, self._residuals, strict=True)):
            draw = Draw(Stream(getattr(self.method, "seed", 0), 0, "code"), self._step, rank)
            values = gradient
            if isinstance(self.method, ECQSGD):
                values = residual * np.float32(self.method.alpha) + gradient
            elif isinstance(self.method, OneBitSGD):
                values = gradient + residual
            if shared is not None and isinstance(codec, Quantizer):
                codec.pack(codec.codes(values, shared, draw), shared, payload)
                self.bits += 8 * shared.nbytes / ranks  # told beforehand
            else:
                codec.encode(values, payload, draw=draw)
            codec.decode(payload, sent, weight=1)
            self.bits += 8 * sent_bytes(codec, payload, n) / ranks
            self.formula += formula_bits(self.method, payload, sent) / ranks
            if isinstance(self.method, ECQSGD):
                residual *= np.float32(self.method.beta)
                residual += gradient - sent
            elif isinstance(self.method, OneBitSGD):
                residual[:] = values - sent
            total += sent
        self._step += 1
        return total / np.float32(ranks)


def formula_bits(method: Algorithm, payload: NDArray[np.uint8], sent: Values) -> float:
    """Bits of a message by the pages of the methods; of entropy-coded ones from how often each code occurs in it."""
    n = sent.size
    planes = 64 * -(-n // 64)
    if isinstance(method, Dense):
        return 32 * n
    if isinstance(method, OneBitSGD):
        return 2 * 32 + planes
    if isinstance(method, TernGrad):
        return 32 + 64 + 2 * planes
    assert isinstance(method, QSGD | ECQSGD)
    s = method.levels
    if method.coding == "fixed":
        return 64 + math.ceil(math.log2(2 * s + 1)) * planes
    scale = float(payload[:4].view(np.float32)[0])
    levels = np.rint(sent * (s / scale)).astype(np.int64) if scale else np.zeros(n, np.int64)
    counts = np.bincount(np.where(levels < 0, s - levels, levels), minlength=2 * s + 1)
    there = counts[counts > 0]
    entropy = float((there * np.log2(n / there)).sum())
    frequencies = float((2 * np.floor(np.log2(there * 2 ** n.bit_length() / n + 1)) + 1).sum())
    together = math.floor(math.log(256, 2 * s + 1))
    plain = 8 * math.ceil(n / together)
    length = 8 * math.ceil((plain // 8 + 1).bit_length() / 8)
    return 32 + length + min(8 + 32 + frequencies + entropy, 8 + plain)


def train(
    problem: Problem, method: Algorithm, *, ranks: int, steps: int, lr: float, batch: int, seed: int, every: int = 50
) -> dict[str, Any]:
    """Train from zero; samples are drawn alike whatever the method.

    Returns
    -------
    dict
        ``steps``, ``loss`` and ``distance`` (to the w that made the data) at each look, and ``bits`` and
        ``formula``: of a rank's message, mean over ranks and steps. Training that diverged ends early, with infinity
        from there on.
    """
    looks = [*range(0, steps, every), steps]
    together, w = Together(method, ranks, problem.w.size), np.zeros(problem.w.size, np.float32)
    shards = [np.arange(rank, len(problem.y), ranks) for rank in range(ranks)]
    random = [np.random.default_rng((seed, rank, 4)) for rank in range(ranks)]
    loss, distance = [], []
    for step in range(steps + 1):
        if step in looks:
            loss.append(problem.value(w))
            distance.append(float(np.linalg.norm(w.astype(np.float64) - problem.w)))
            if not distance[-1] < DIVERGED * distance[0]:
                break
        if step < steps:
            rows = [mine[rng.integers(0, mine.size, batch)] for mine, rng in zip(shards, random, strict=True)]
            w -= np.float32(lr) * together.mean([problem.gradient(w, chosen) for chosen in rows])
    return {
        "steps": looks,
        "loss": loss + [float("inf")] * (len(looks) - len(loss)),
        "distance": distance + [float("inf")] * (len(looks) - len(loss)),
        "bits": together.bits / max(step, 1),
        "formula": together.formula / max(step, 1),
    }
