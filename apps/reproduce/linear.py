"""Linear models on made data, trained by several ranks in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.local import run_local
from mpicomp.algorithms import Algorithm, Dense

Values = NDArray[np.float32]


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
        slope = scores - y if self.loss == "squared" else -y / (1 + np.exp(y * scores))
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
    """Sparse features, most of them without meaning; two classes."""
    rng = np.random.default_rng((seed, features, 3))
    x = rng.random((samples, features), np.float32)
    x *= rng.random((samples, features), np.float32) < present
    x /= np.sqrt(np.float32(features) * np.float32(present) / 3)
    w = np.where(rng.random(features) < 0.1, 40 * rng.standard_normal(features), 0).astype(np.float32)
    scores = x @ w
    scores -= np.median(scores)
    y = np.where(rng.random(samples) < 1 / (1 + np.exp(-3 * scores)), 1, -1).astype(np.float32)
    return Problem(x, y, w, "log")


def train(
    problem: Problem, method: Algorithm, *, ranks: int, steps: int, lr: float, batch: int, seed: int, every: int = 50
) -> dict[str, Any]:
    """Train from zero; samples are drawn alike whatever the method.

    Returns
    -------
    dict
        ``steps``, ``loss`` and ``distance`` (to the w that made the data) at each look, and ``bits``: of a rank's
        payload, mean over steps.
    """
    looks = [*range(0, steps, every), steps]

    def rank(comm: Communicator) -> dict[str, Any]:
        rng = np.random.default_rng((seed, comm.rank, 4))
        mine = np.arange(comm.rank, len(problem.y), comm.size)
        w = np.zeros(problem.w.size, np.float32)
        aggregator = method.start(comm, w.size)
        loss, distance = [], []
        for step in range(steps + 1):
            if step in looks and comm.rank == 0:
                loss.append(problem.value(w))
                distance.append(float(np.linalg.norm(w.astype(np.float64) - problem.w)))
            if step < steps:
                rows = mine[rng.integers(0, mine.size, batch)]
                w -= np.float32(lr) * aggregator.aggregate(problem.gradient(w, rows))
        sent = aggregator.traffic.total.bytes_sent
        return {"loss": loss, "distance": distance, "sent": sent}

    found = run_local(ranks, rank, verify=False)  # so that only the method itself sends bytes
    return {
        "steps": looks,
        "loss": found[0]["loss"],
        "distance": found[0]["distance"],
        "bits": payload_bits(method, found[0]["sent"], ranks, steps, problem.w.size),
    }


def payload_bits(method: Algorithm, sent: int, ranks: int, steps: int, n: int) -> float:
    """Bits that a rank tells each other rank at a step: from what it handed to MPI, the NaN flag left out."""
    if isinstance(method, Dense):
        return 32.0 * n
    return 8 * (sent / (steps * (ranks - 1)) - 1)
