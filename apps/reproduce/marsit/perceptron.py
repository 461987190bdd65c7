"""A perceptron whose parameters are one flat vector, trained in NumPy: a step takes a tenth of the time of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.records import Record
from apps.train.data import load
from apps.train.learning_rate import LearningRate
from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp.algorithms import Algorithm

Values = NDArray[np.float32]
MOMENTUM = 0.9
ALIGNED = 64  # a tensor begins at a multiple of so many elements, as `tensor_lengths` demands


@dataclass(frozen=True)
class Perceptron:
    """One hidden layer with ReLU, then classes by softmax."""

    inputs: int
    hidden: int
    classes: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors, in order."""
        return (self.inputs, self.hidden), (self.hidden,), (self.hidden, self.classes), (self.classes,)

    @property
    def tensor_lengths(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(int(np.prod(shape)) for shape in self.shapes)

    @property
    def n(self) -> int:
        """Elements of the vector, with zeros between tensors."""
        return sum(-(-length // ALIGNED) * ALIGNED for length in self.tensor_lengths)

    def tensors(self, w: Values) -> list[Values]:
        """Views into a vector."""
        found, begin = [], 0
        for shape, length in zip(self.shapes, self.tensor_lengths, strict=True):
            found.append(w[begin : begin + length].reshape(shape))
            begin += -(-length // ALIGNED) * ALIGNED
        return found

    def initial(self, seed: int) -> Values:
        """Normal weights after He et al.; biases are zero."""
        rng, w = np.random.default_rng((seed, 5)), np.zeros(self.n, np.float32)
        first, _, second, _ = self.tensors(w)
        first[:] = rng.standard_normal(first.shape, np.float32) * np.float32((2 / self.inputs) ** 0.5)
        second[:] = rng.standard_normal(second.shape, np.float32) * np.float32((2 / self.hidden) ** 0.5)
        return w

    def scores(self, w: Values, x: Values) -> tuple[Values, Values]:
        """Outputs of the hidden layer and of the last one, a row for each sample."""
        first, first_bias, second, second_bias = self.tensors(w)
        inner = np.maximum(x @ first + first_bias, 0)
        return inner, inner @ second + second_bias

    def gradient(self, w: Values, x: Values, y: NDArray[np.int64], out: Values) -> None:
        """Write the gradient of the mean cross entropy into `out`, whose padding does not change."""
        inner, scores = self.scores(w, x)
        slope = np.exp(scores - scores.max(axis=1, keepdims=True))
        slope /= slope.sum(axis=1, keepdims=True)
        slope[np.arange(len(y)), y] -= 1
        slope /= np.float32(len(y))
        first, first_bias, second, second_bias = self.tensors(out)
        np.matmul(inner.T, slope, out=second)
        slope.sum(axis=0, out=second_bias)
        back = (slope @ self.tensors(w)[2].T) * (inner > 0)
        np.matmul(x.T, back, out=first)
        back.sum(axis=0, out=first_bias)

    def accuracy(self, w: Values, x: Values, y: NDArray[np.int64]) -> float:
        """Fraction of the samples whose class has the highest score."""
        return float((self.scores(w, x)[1].argmax(axis=1) == y).mean())


@dataclass(frozen=True, eq=False)
class Images:
    """Flat images, float32[samples, pixels], and classes, int64[samples]."""

    x: Values
    y: NDArray[np.int64]
    test_x: Values
    test_y: NDArray[np.int64]


@cache
def garments() -> Images:
    """Fashion-MNIST at 14 x 14: the mean of each 2 x 2 pixels."""
    whole = load("fashion-mnist")

    def flat(images: Any) -> Values:
        pooled = images.numpy().reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4))
        return np.ascontiguousarray(pooled.reshape(len(pooled), -1), np.float32)

    return Images(
        flat(whole.train.images), whole.train.labels.numpy(), flat(whole.test.images), whole.test.labels.numpy()
    )


def train(
    model: Perceptron, images: Images, method: Algorithm, *,
    ranks: int, steps: int, batch: int, lr: float, seed: int, every: int,
) -> Record:  # fmt: skip
    """Train with momentum on each rank; `method` averages the updates, and the learning rate falls as a cosine.

    Returns
    -------
    dict
        Test ``accuracy`` after each of ``steps``, one of `every` steps; ``bits`` per element and phase, from the bytes
        that rank 0 sent. The seed alone decides the samples, for every method.
    """
    looks, rates = [*range(0, steps, every), steps], LearningRate(lr, steps, steps // 50, "cosine")

    def rank(comm: Communicator) -> Record:
        rng = np.random.default_rng((seed, comm.rank, 6))
        w, momentum, found = model.initial(seed), np.zeros(model.n, np.float32), []
        gradient, result = np.zeros_like(w), np.zeros_like(w)
        aggregator = method.start(comm, model.n, tensor_lengths=model.tensor_lengths)
        for step in range(steps + 1):
            if step in looks and comm.rank == 0:
                found.append(model.accuracy(w, images.test_x, images.test_y))
            if step < steps:
                rows = rng.integers(0, len(images.y), batch)
                model.gradient(w, images.x[rows], images.y[rows], gradient)
                momentum *= np.float32(MOMENTUM)
                momentum += gradient
                aggregator.aggregate(momentum * np.float32(rates(step)), result)
                w -= result
        return {"accuracy": found, "sent": aggregator.traffic.total.bytes_sent}

    found = run_local(ranks, rank, "ring", verify=False)  # so that only the method itself sends bytes
    phases = 2 * (ranks - 1) / ranks
    bits = 8 * found[0]["sent"] / (steps * model.n * phases) if ranks > 1 else 0.0
    return {"steps": looks, "accuracy": found[0]["accuracy"], "bits": bits}
