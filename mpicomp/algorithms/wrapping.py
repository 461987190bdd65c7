"""Base of methods that run another one, and have its properties."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, cast

from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm, MessageModel


def require_residual(method: Algorithm, wrapper: str) -> None:
    """Raise ValueError if a method leaves its residual to the caller, who does not see it within a wrapper."""
    if method.leaves_residual:
        raise ValueError(
            f"{method!r} leaves its residual in the copy of the model, which {wrapper} does not see: pass "
            "residual='own'"
        )


def _of_method(name: str) -> Any:
    """Return a property that reads this attribute of the method that is run."""
    return property(attrgetter(f"method.{name}"))


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

    synchronize = _of_method("synchronize")
    uses_tensor_lengths = _of_method("uses_tensor_lengths")
    estimates_mean = _of_method("estimates_mean")
    keeps_scale = _of_method("keeps_scale")
    nonfinite = _of_method("nonfinite")
    has_rates_by_position = _of_method("has_rates_by_position")

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
