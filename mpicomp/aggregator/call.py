"""One step of one vector, from `begin` to its result."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

from collectives import Communicator, NonFiniteGradient, Traffic
from collectives.annotations import FloatArray, override
from collectives.execution.handle import Call
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.difference import Difference
from mpicomp.aggregator.spec import VectorSpec


class User(Protocol):
    """Owner of calls, which makes them one at a time."""

    def let_go(self, call: VectorCall) -> None:
        """Forget a call whose end the caller has seen."""
        ...


class VectorCall(Call):
    """Call of an aggregator.

    Attributes
    ----------
    group : Communicator
    user : weak reference
        The aggregator, which may be used again once the caller has seen how the call ended.
    spec : VectorSpec
    step : int
    values : ndarray[n]
        This rank's vector in the type of computing, float32 or float64; read only. If a device encodes the vector,
        `values`, `wide` and `out` are tensors on the device.
    difference : Difference or None
        Difference from which `values` is computed when it is first read.
    wide : float32[n] or None
        For 16-bit vectors: the same memory as `values`; may be overwritten.
    out : ndarray[n]
        Overwritten with the result; uint16 for bfloat16.
    traffic : Traffic
        Counts the messages and times of the call.
    """

    # set by the aggregator
    group: Communicator
    user: ref[User]
    spec: VectorSpec
    step: int
    values: FloatArray
    out: FloatArray
    traffic: Traffic
    wide: FloatArray | None = None
    difference: Difference | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "values" and self.difference is not None:
            self.values = self.difference.take()
            return self.values
        raise AttributeError(name)

    @property
    def is_taken(self) -> bool:
        """True once the vector has been computed; the tensors of `difference` may be gone then."""
        return "values" in self.__dict__

    @override
    def mark_seen(self) -> None:
        super().mark_seen()
        user = self.user()
        if user is not None:
            user.let_go(self)

    @property
    def where(self) -> str:
        """Number of the vector and step, for messages."""
        return f"vector {self.spec.vector_id}, step {self.step}"

    def non_finite(self, ranks: tuple[int, ...], what: str = "") -> NonFiniteGradient:
        """Return the error for NaN or infinity from these ranks; no rank: a sum has overflowed."""
        return nonfinite.error(self.group, ranks, f"{what} of {self.where}" if what else self.where)

    def out_of_range(self, ranks: tuple[int, ...], what: str) -> NonFiniteGradient:
        """Return the error for finite numbers of these ranks that have no code; `what` is the end of its sentence."""
        return nonfinite.out_of_range(self.group, ranks, self.where, what)
