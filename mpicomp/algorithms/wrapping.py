"""Base of methods that run another one, and have its properties."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields, replace
from typing import Any, cast

from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Synchronize


def require_residual(method: Algorithm, wrapper: str) -> None:
    """Raise ValueError if a method leaves its residual to the caller, who does not see it within a wrapper."""
    if method.leaves_residual:
        raise ValueError(
            f"{method!r} leaves its residual in the copy of the model, which {wrapper} does not see: pass "
            "residual='own'"
        )


class WrappingMethod(Algorithm):
    """Options of a method that runs `method`, whose properties it has."""

    @property
    @abstractmethod
    def method(self) -> Algorithm:
        """The method that is run."""

    @property
    @override
    def rehearsed(self) -> tuple[Algorithm, ...]:
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
    @override
    def nonfinite(self) -> str:
        return self.method.nonfinite

    @property
    @override
    def has_rates_by_position(self) -> bool:
        return self.method.has_rates_by_position

    @override
    def of_gradients(self) -> Algorithm:
        method, best = self.method, self.method.of_gradients()
        options: Any = self
        place = next(one.name for one in fields(options) if getattr(self, one.name) is method)
        return self if best is method else cast(Algorithm, replace(options, **{place: best}))

    @override
    def shard_alignment(self, n: int, dtype: str) -> int | None:
        return self.method.shard_alignment(n, dtype)

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return self.method.encodes_on_devices(dtype)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return self.method.message_model(n, dtype, ranks, piece_bytes)
