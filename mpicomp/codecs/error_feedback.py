"""What a rank keeps of what its codec left out, and gives to the next step.

Works on parts of vectors that fit the caches, so that a vector is read from memory once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from mpicomp import kernels

Part = NDArray[Any]


class ErrorRule(Protocol):
    """How a residual enters a step and what a codec's error becomes. All arrays are of one length and dtype."""

    def compensate(self, values: Part, residual: Part, out: Part) -> None:
        """Overwrite `out` with what is to be encoded."""

    def keep(self, values: Part, compensated: Part, sent: Part, residual: Part, out: Part) -> bool:
        """Overwrite `out` with the next residual; `sent` is what the codec made of `compensated`.

        Returns
        -------
        bool
            Whether it is finite.
        """
        ...


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """p = g + e; e <- p - Q(p)."""

    def compensate(self, values: Part, residual: Part, out: Part) -> None:
        """See `ErrorRule`."""
        kernels.of("cpu").error_feedback.compensate(values, residual, None, out)

    def keep(self, values: Part, compensated: Part, sent: Part, residual: Part, out: Part) -> bool:
        """See `ErrorRule`."""
        return bool(kernels.of("cpu").error_feedback.keep(compensated, sent, residual, None, out))


@dataclass(frozen=True, slots=True)
class ErrorAccumulation:
    """p = g + alpha h; h <- beta h + (g - Q(p))."""

    alpha: float
    beta: float

    def compensate(self, values: Part, residual: Part, out: Part) -> None:
        """See `ErrorRule`."""
        kernels.of("cpu").error_feedback.compensate(values, residual, residual.dtype.type(self.alpha), out)

    def keep(self, values: Part, compensated: Part, sent: Part, residual: Part, out: Part) -> bool:
        """See `ErrorRule`."""
        return bool(kernels.of("cpu").error_feedback.keep(values, sent, residual, residual.dtype.type(self.beta), out))
