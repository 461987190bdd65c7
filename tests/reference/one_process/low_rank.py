"""PowerSGD with all ranks in one process and plain NumPy; factors are arrays [rank, n], sums in the kernels' order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.one_process.allreduce import dense, rounded
from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.philox import draw

LANES = 16


def products(a: Vectors, b: Vectors) -> Vectors:
    """Return the inner product of each row of a with each row of b: sums of 16 lanes, halves first, then the rest."""
    n = a.shape[1]
    whole = n // LANES * LANES
    lanes = np.zeros((len(a), len(b), LANES), a.dtype)
    for j in range(0, whole, LANES):
        lanes += a[:, None, j : j + LANES] * b[None, :, j : j + LANES]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    total = lanes[:, :, 0]
    for j in range(whole, n):
        total = total + a[:, None, j] * b[None, :, j]
    return total


def orthonormalize(rows: Vectors) -> list[int]:
    """Make rows orthonormal, in place; return those that depend on earlier ones, which become zeros."""
    kind, dependent = rows.dtype.type, []
    wide = rows.astype(np.float64)

    def dot(k: int, m: int) -> float:
        return float(products(wide[k : k + 1], wide[m : m + 1])[0, 0])

    def put(k: int, values: NDArray[np.float64]) -> None:
        wide[k] = values.astype(kind)

    for k in range(len(rows)):
        exponent = math.frexp(float(np.abs(wide[k]).max()))[1]
        put(k, wide[k] * math.ldexp(1, min(max(-exponent, -1000), 1000)))
        before = math.sqrt(dot(k, k))
        for _ in range(2):
            for m in range(k):
                put(k, wide[k] - dot(m, k) * wide[m])
            left = math.sqrt(dot(k, k))
            if left <= np.finfo(kind).eps * before:
                wide[k] = 0
                dependent.append(k)
                break
            put(k, wide[k] * (1 / left))
            before = 1
    rows[:] = wide
    return dependent


class OneProcess(Simulation):
    """A run of it.

    Attributes
    ----------
    blocks : list of (first element, stop, rows)
        Matrices, and stretches of 0 rows that are sent as they are.
    factors : list of ndarray[rank, columns]
        Orthonormal right factor of each matrix.
    """

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        rank = self.options.rank
        self.blocks, self.factors = list[tuple[int, int, int]](), list[Vectors]()
        for start, length, stop in zip(self.starts, self.lengths, [*self.starts[1:], self.n], strict=True):
            rows = math.isqrt(length)
            cols = length // max(rows, 1)
            if rank * (rows + cols) < rows * cols:
                self.blocks.append((start, start + rows * cols, rows))
                self.factors.append(np.zeros((rank, cols), self.compute))
                start += rows * cols
            if start < stop:
                self.blocks.append((start, stop, 0))
        self.renew(0)

    def renew(self, step: int) -> None:
        """Make all right factors orthonormal, with new rows where some depend on others."""
        count, start = sum(factor.size for factor in self.factors), 0
        words = draw(self.stream("factors").key(), 0, -(-count // LANES), 0, step, 0)
        fresh = (words.view(np.int32)[:count] * 2.0**-31).astype(self.compute)
        for factor in self.factors:
            if lost := orthonormalize(factor):
                factor[lost] = fresh[start : start + factor.size].reshape(factor.shape)[lost]
                orthonormalize(factor)
            start += factor.size

    def mean(self, messages: list[list[Vectors]]) -> list[Vectors]:
        """Return the mean over ranks of each array in their messages."""
        rows = np.stack([np.concatenate([one.reshape(-1) for one in message] or [np.zeros(0)]) for message in messages])
        mean, found = dense(self.topology, rows.astype(self.compute), "mean"), []
        for one in messages[0]:
            found.append(mean[: one.size].reshape(one.shape))
            mean = mean[one.size :]
        return found

    def compute_step(self, g: Vectors) -> Vectors:
        if self.t < self.options.start_step:
            return dense(self.topology, g, "mean")
        sums, factors = g + self.residuals, iter(self.factors)
        matrices = [(k, one, next(factors)) for k, one in enumerate(self.blocks) if one[2]]
        parts = [[own[start:stop].reshape(rows or 1, -1) for start, stop, rows in self.blocks] for own in sums]
        messages = [list(own) for own in parts]
        for message in messages:
            for k, _, factor in matrices:
                message[k] = products(factor, message[k])
        left = self.mean(messages)
        for k, _, _ in matrices:
            orthonormalize(left[k])
        messages = []
        for own in parts:
            messages.append([np.zeros_like(factor) for *_, factor in matrices])
            for (k, _, _), q in zip(matrices, messages[-1], strict=True):
                for i, row in enumerate(own[k]):
                    q += left[k][:, i : i + 1] * row
        results = list(left)
        for (k, _, factor), mean in zip(matrices, self.mean(messages), strict=True):
            factor[:] = mean
            results[k] = left[k][0][:, None] * factor[0]
            for j in range(1, len(factor)):
                results[k] = results[k] + left[k][j][:, None] * factor[j]
        result = np.concatenate([one.reshape(-1) for one in results] or [np.zeros(0, self.compute)])
        self.residuals = np.zeros_like(sums)
        for k, (start, stop, _), _ in matrices:
            applied = rounded(results[k].reshape(-1), self.dtype).astype(self.compute)
            self.residuals[:, start:stop] = sums[:, start:stop] - applied
        self.renew(self.t + 1)
        return result

    def state(self, rank: int) -> dict[str, Vectors]:
        empty = np.zeros(0, self.compute)
        return {
            "residual": self.residuals[rank],
            "factors": np.concatenate([empty, *(one.reshape(-1) for one in self.factors)]),
        }
