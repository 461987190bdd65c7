"""Base of methods that run another one, and have its properties."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, cast

from collectives.annotations import override
from mpicomp.aggregator.algorithm import Algorithm


def require_residual(method: Algorithm, wrapper: str) -> None:
    """Raise ValueError if a method leaves its residual to the caller, who does not see it within a wrapper."""
    if method.leaves_residual:
        raise ValueError(
            f"{method!r} leaves its residual in the copy of the model, which {wrapper} does not see: pass "
            "residual='own'"
        )


def _of_method(name: str) -> Any:
    """Return an attribute that is that of the method which is run; a method of it stays bound to it."""
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
    shard_alignment = _of_method("shard_alignment")
    encodes_on_devices = _of_method("encodes_on_devices")
    message_model = _of_method("message_model")

    @override
    def of_gradients(self) -> Algorithm:
        method, best = self.method, self.method.of_gradients()
        options: Any = self
        place = next(one.name for one in fields(options) if getattr(self, one.name) is method)
        return self if best is method else cast(Algorithm, replace(options, **{place: best}))
