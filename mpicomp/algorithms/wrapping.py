"""Base of methods that run another one, and have its properties."""

from __future__ import annotations

from abc import abstractmethod

from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Synchronize


class WrappingMethod(Algorithm):
    """Options of a method that runs `method`, whose properties it has."""

    @property
    @abstractmethod
    def method(self) -> Algorithm:
        """The method that is run."""

    @property
    def rehearsed(self) -> tuple[Algorithm, ...]:
        """Methods whose kernels the steps call."""
        return (self.method,)

    @property
    def synchronize(self) -> Synchronize:  # type: ignore[override]  # of the options, where other methods have one
        """Best input of the method."""
        return self.method.synchronize

    @property
    @override
    def uses_tensor_lengths(self) -> bool:
        return self.method.uses_tensor_lengths

    @property
    @override
    def estimates_mean(self) -> bool:
        return self.method.estimates_mean

    @property
    @override
    def keeps_scale(self) -> bool:
        return self.method.keeps_scale

    @property
    def nonfinite(self) -> str:
        """Treatment of steps with NaN or infinity, as for the method: "raise" or "skip"."""
        return str(getattr(self.method, "nonfinite", "raise"))

    @override
    def shard_alignment(self, n: int, dtype: str) -> int | None:
        return self.method.shard_alignment(n, dtype)

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return self.method.encodes_on_devices(dtype)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return self.method.message_model(n, dtype, ranks, piece_bytes)
