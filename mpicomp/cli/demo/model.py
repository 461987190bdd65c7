"""Model of the demo: a perceptron in NumPy that predicts the next character of a text, and Adam."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

CONTEXT, SYMBOLS, CODE, HIDDEN = 4, 96, 64, 2880
SHAPES = ((CONTEXT * CODE, HIDDEN), (HIDDEN,), (HIDDEN, SYMBOLS), (SYMBOLS,))
"""Weights and biases of the hidden layer, then of the output."""
N_PARAMETERS = sum(int(np.prod(shape)) for shape in SHAPES)
RATE, BETAS = 0.004, (0.9, 0.99)
TESTED_TOGETHER = 256  # characters, whose hidden layer fits into a processor's cache
# Each character is 64 random signs. Inputs of which only one is not 0 would leave most gradients at 0, and one-bit
# codes cannot express a zero.
CODES = np.random.default_rng(7).choice(np.array((-1, 1), np.float32), (SYMBOLS, CODE))


def initial_parameters(seed: int) -> Floats:
    """Return random weights, and biases of 0."""
    random, parameters = np.random.default_rng(seed), np.zeros(N_PARAMETERS, np.float32)
    hidden_weights, _, output_weights, _ = _tensors(parameters)
    hidden_weights[:] = random.standard_normal(hidden_weights.shape, np.float32) / np.sqrt(CONTEXT * CODE)
    output_weights[:] = random.standard_normal(output_weights.shape, np.float32) * 0.5 / np.sqrt(HIDDEN)
    return parameters


def gradient(parameters: Floats, contexts: Integers, following: Integers, out: Floats) -> None:
    """Overwrite `out` with the gradient of the mean cross entropy."""
    # contexts: int64[batch, CONTEXT], characters as numbers below `SYMBOLS`; following: int64[batch]
    batch = np.arange(len(following))
    _, _, output_weights, _ = _tensors(parameters)
    hidden_weights_out, hidden_bias_out, output_weights_out, output_bias_out = _tensors(out)
    inputs, hidden, scores = _forward(parameters, contexts)
    scores -= scores.max(axis=1, keepdims=True)
    error = np.exp(scores)
    error /= error.sum(axis=1, keepdims=True)
    error[batch, following] -= 1
    error /= np.float32(len(batch))
    np.matmul(hidden.T, error, out=output_weights_out)
    error.sum(axis=0, out=output_bias_out)
    hidden_error = (error @ output_weights.T) * (hidden > 0)
    hidden_error.sum(axis=0, out=hidden_bias_out)
    np.matmul(inputs.T, hidden_error, out=hidden_weights_out)


def n_correct(parameters: Floats, contexts: Integers, following: Integers) -> int:
    """Return how many of the following characters the model predicts."""
    found = 0
    for start in range(0, len(following), TESTED_TOGETHER):
        part = slice(start, start + TESTED_TOGETHER)
        found += int((_forward(parameters, contexts[part])[-1].argmax(axis=1) == following[part]).sum())
    return found


class Adam:
    """Adam without weight decay, whose update is subtracted by the caller."""

    def __init__(self) -> None:
        self._steps = 0
        self._momentum, self._squares, self._update = (np.zeros(N_PARAMETERS, np.float32) for _ in range(3))

    def update(self, gradient: Floats) -> Floats:
        """Return the update for a gradient. The array is overwritten by the next call."""
        self._steps += 1
        # The sums lack the factor 1 - beta, and are biased towards 0 in the first steps.
        first, second = ((1 - beta) / (1 - beta**self._steps) for beta in BETAS)
        rate = np.float32(RATE * first / np.sqrt(second))
        adam_step(gradient, rate, self._momentum, self._squares, self._update)
        return self._update


@numba.njit("void(f4[::1], f4, f4[::1], f4[::1], f4[::1])", nogil=True, fastmath=True)
def adam_step(gradient, rate, momentum, squares, update):  # type: ignore[no-untyped-def]  # Numba has the types
    """Adam in one pass: NumPy needs eight, which would take longer than the gradient."""
    first, second, small = np.float32(BETAS[0]), np.float32(BETAS[1]), np.float32(1e-8)
    for element in range(gradient.size):
        momentum[element] = first * momentum[element] + gradient[element]
        squares[element] = second * squares[element] + gradient[element] * gradient[element]
        update[element] = rate * momentum[element] / (np.sqrt(squares[element]) + small)


def _forward(parameters: Floats, contexts: Integers) -> tuple[Floats, Floats, Floats]:
    """Return inputs, hidden layer and scores of all symbols: float32[batch, ...]."""
    hidden_weights, hidden_bias, output_weights, output_bias = _tensors(parameters)
    inputs = CODES[contexts].reshape(len(contexts), CONTEXT * CODE)
    hidden = inputs @ hidden_weights
    hidden += hidden_bias
    np.maximum(hidden, 0, out=hidden)
    return inputs, hidden, hidden @ output_weights + output_bias


def _tensors(vector: Floats) -> list[Floats]:
    """Return a view of each tensor."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(vector, ends[:-1]), SHAPES, strict=True)]
