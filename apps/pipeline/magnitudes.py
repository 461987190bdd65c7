"""Magnitudes of activations, and of their changes from one visit of an example to the next (AQ-SGD, Fig. 1b)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Magnitudes:
    """Watches the outputs of a module for examples that it sees again and again."""

    def __init__(self, module: nn.Module, examples: int) -> None:
        # of each step: the mean size of an element, and of its change since the example's last visit; NaN for a step
        # with no example seen before
        self.activations, self.changes = list[float](), list[float]()
        self._last: list[Tensor | None] = [None] * examples
        self._ids: list[int] = []
        self._sizes: list[tuple[float, float]] = []
        module.register_forward_hook(self._look)

    @contextmanager
    def of(self, ids: NDArray[np.int64]) -> Iterator[None]:
        """The module sees these examples, in this order."""
        self._ids, self._sizes = ids.tolist(), []
        yield
        means = np.nanmean(np.array(self._sizes), axis=0) if self._any_seen() else (self._mean_size(), np.nan)
        self.activations.append(float(means[0]))
        self.changes.append(float(means[1]))

    def _any_seen(self) -> bool:
        return any(np.isfinite(change) for _, change in self._sizes)

    def _mean_size(self) -> float:
        return float(np.mean([size for size, _ in self._sizes]))

    def _look(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not module.training or not self._ids:
            return
        for row in output.detach():
            example = self._ids.pop(0)
            last = self._last[example]
            change = torch.nan if last is None else float((row - last).abs().mean())
            self._sizes.append((float(row.abs().mean()), change))
            self._last[example] = row.clone()
