"""Linear models on generated data, trained by ranks that are threads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from apps.records import Record
from collectives import Communicator, NonFiniteGradient
from collectives.threads.run_local import run_local
from mpicomp.algorithms import ECQSGD, QSGD, Algorithm, Dense, OneBitSGD, TernGrad
from mpicomp.codecs import Draw
from mpicomp.codecs.base import sent_bytes
from mpicomp.kernels.streams import Stream

Values = NDArray[np.float32]
DIVERGED = 100.0
"""Training ends when its distance from w is so many times what it was at the beginning."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Samples ``x[samples, features]`` and ``y[samples]``, and the model ``w[features]`` that generated y.

    With the loss "squared" y are numbers, with "log" the classes -1 and 1.
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
        """Gradient of the mean loss over the samples `rows`."""
        x, y = self.x[rows], self.y[rows]
        scores = x @ w
        slope = scores - y if self.loss == "squared" else -y * expit(-y * scores)
        return (x.T @ slope / np.float32(len(rows))).astype(np.float32)


def synthetic(features: int, seed: int, samples: int = 10_000, noise: float = 1.0) -> Problem:
    """Generate Syn of the paper: y = w x + noise; w, x and noise are standard normal."""
    rng = np.random.default_rng((seed, features, 1))
    w = rng.standard_normal(features, np.float32)
    x = rng.standard_normal((samples, features), np.float32)
    return Problem(x, x @ w + noise * rng.standard_normal(samples, np.float32), w, "squared")


def regression(seed: int, features: int = 90, samples: int = 20_000) -> Problem:
    """Generate correlated features, each divided by its standard deviation."""
    rng = np.random.default_rng((seed, features, 2))
    mixing = rng.standard_normal((features, features)) / np.sqrt(features) + np.eye(features)
    x = rng.standard_normal((samples, features)) @ mixing
    x = (x / x.std(axis=0)).astype(np.float32)
    w = rng.standard_normal(features, np.float32)
    return Problem(x, x @ w + 3 * rng.standard_normal(samples, np.float32), w, "squared")


def classification(seed: int, features: int = 5000, samples: int = 4000, present: float = 0.13) -> Problem:
    """Generate sparse features between 0 and 1, and two classes that depend on a tenth of the features."""
    rng = np.random.default_rng((seed, features, 3))
    x = rng.random((samples, features), np.float32)
    x *= rng.random((samples, features), np.float32) < present
    w = np.where(rng.random(features) < 0.1, rng.standard_normal(features), 0).astype(np.float32)
    scores = (x @ w).astype(np.float64)
    scores -= np.median(scores)
    y = np.where(rng.random(samples) < expit(8 * scores / scores.std()), 1, -1).astype(np.float32)
    return Problem(x, y, w, "log")


def message_bits(method: Algorithm, gradient: Values, residual: Values, step: int, rank: int) -> tuple[float, float]:
    """Bits of the message that a rank sends to each other rank, and the same by the formula on the page of the method.

    Parameters
    ----------
    method : Dense, QSGD, ECQSGD, TernGrad or OneBitSGD
        The whole vector is one bucket.
    gradient : float32[n]
    residual : float32[n]
        Of the aggregator before the step; methods without a residual do not look at it.
    step, rank : int

    Returns
    -------
    bits : float
        Bits of the message; the word that reports NaN is not counted.
    formula : float
        For entropy codes, the formula takes the entropy of the codes in this message.
    """
    n = gradient.size
    sign_bits = 64 * -(-n // 64)
    if isinstance(method, Dense):
        return 32 * n, 32 * n
    if not isinstance(method, QSGD | ECQSGD | TernGrad | OneBitSGD):
        raise ValueError(f"{method} does not gather codes")
    if method.bucket < n:
        raise ValueError(f"{method} has buckets shorter than the vector of {n} elements")
    codec = method.codec
    if isinstance(method, OneBitSGD):
        return 8 * codec.nbytes(n), 2 * 32 + sign_bits
    if isinstance(method, TernGrad):
        return 32 + 8 * codec.nbytes(n), 32 + 64 + 2 * sign_bits  # the scale is shared before
    if method.coding == "fixed":
        return 8 * codec.nbytes(n), 64 + math.ceil(math.log2(2 * method.levels + 1)) * sign_bits
    values = residual * np.float32(method.alpha) + gradient if isinstance(method, ECQSGD) else gradient
    payload, decoded = np.empty(codec.nbytes(n), np.uint8), np.empty(n, np.float32)
    codec.encode(values, payload, draw=Draw(Stream(method.seed, 0, "code"), step, rank))
    codec.decode(payload, decoded, weight=1)
    scale = float(payload[:4].view(np.float32)[0])
    return 8 * sent_bytes(codec, payload, n), entropy_coded_bits(decoded, scale, method.levels)


def entropy_coded_bits(decoded: Values, scale: float, s: int) -> float:
    """Bits of an entropy-coded message by the formula, from how often each of the 2 s + 1 codes occurs in it."""
    n = decoded.size
    levels = np.rint(decoded * (s / scale)).astype(np.int64) if scale else np.zeros(n, np.int64)
    counts = np.bincount(np.where(levels < 0, s - levels, levels), minlength=2 * s + 1)
    counts = counts[counts > 0]
    entropy = float((counts * np.log2(n / counts)).sum())
    frequencies = float((2 * np.floor(np.log2(counts * 2 ** n.bit_length() / n + 1)) + 1).sum())
    codes_per_byte = math.floor(math.log(256, 2 * s + 1))
    plain = 8 * math.ceil(n / codes_per_byte)
    length = 8 * math.ceil((plain // 8 + 1).bit_length() / 8)
    return 32 + length + min(8 + 32 + frequencies + entropy, 8 + plain)


def train(
    problem: Problem, method: Algorithm, *, ranks: int, steps: int, lr: float, batch: int, seed: int, every: int = 50
) -> Record:
    """Train from zero, by ranks that are threads; all methods see the same samples.

    Returns
    -------
    dict
        ``loss`` and ``distance`` (to the w that made the data) after each of ``steps``, one of `every` steps; ``bits``
        and ``formula``: see `message_bits`; mean over ranks and steps. Training that diverged ends early, with infinity
        from there on.
    """
    looks = [*range(0, steps, every), steps]

    def rank(comm: Communicator) -> tuple[list[float], list[float], NDArray[np.float64]]:
        own, rng = np.arange(comm.rank, len(problem.y), ranks), np.random.default_rng((seed, comm.rank, 4))
        w, mean, bits = np.zeros_like(problem.w), np.zeros_like(problem.w), np.zeros(2)
        aggregator: Any = method.start(comm, w.size)
        loss, distance = [], []
        for step in range(steps + 1):
            if step in looks:
                loss.append(problem.value(w) if comm.rank == 0 else 0.0)
                distance.append(float(np.linalg.norm(w.astype(np.float64) - problem.w)))
                if not distance[-1] < DIVERGED * distance[0]:
                    break
            if step < steps:
                gradient = problem.gradient(w, own[rng.integers(0, own.size, batch)])
                bits += message_bits(method, gradient, getattr(aggregator, "residual", gradient), step, comm.rank)
                try:
                    aggregator.aggregate(gradient, mean)
                except NonFiniteGradient:
                    break
                w -= np.float32(lr) * mean
        return loss, distance, bits / max(step, 1)

    found = run_local(ranks, rank, "ring", verify=False)
    loss, distance, _ = found[0]
    rest = [math.inf] * (len(looks) - len(loss))
    bits, formula = np.mean([of_rank[2] for of_rank in found], axis=0).tolist()
    return {"steps": looks, "loss": loss + rest, "distance": distance + rest, "bits": bits, "formula": formula}
