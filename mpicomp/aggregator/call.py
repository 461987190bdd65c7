"""One step of one vector, from `begin` to its result."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

from numpy.typing import NDArray

from collectives import Communicator, NonFiniteGradient, Traffic
from collectives.execution.handle import Call
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.difference import Difference
from mpicomp.aggregator.spec import VectorSpec


class User(Protocol):
    """Who makes calls of vectors, one at a time."""

    def let_go(self, call: VectorCall) -> None:
        """Forget a call whose end the caller has heard of."""
        ...


class VectorCall(Call):
    """A call of an aggregator.

    Attributes
    ----------
    group : Communicator
    user : weak reference
        To the aggregator, which may be used again once the caller has heard how the call ended.
    spec : VectorSpec
    step : int
    values : ndarray[n]
        This rank's vector in the type of computing, float32 or float64; read only. Where the vector is encoded on a
        device, it and `wide` and `out` are tensors there.
    difference : Difference or None
        What the vector is taken from when somebody asks for `values`.
    wide : float32[n] or None
        Of a 16-bit vector: the same memory as `values`, and may be overwritten.
    out : ndarray[n]
        To be overwritten with the result; uint16 for bfloat16.
    traffic : Traffic
        Counted into.
    """

    # set by the aggregator
    group: Communicator
    user: ref[User]
    spec: VectorSpec
    step: int
    values: NDArray[Any]
    out: NDArray[Any]
    traffic: Traffic
    wide: NDArray[Any] | None = None
    difference: Difference | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "values" and self.difference is not None:
            self.values = self.difference.take()
            return self.values
        raise AttributeError(name)

    @property
    def is_taken(self) -> bool:
        """Whether the vector is there as a whole, and what it was the difference of may not be."""
        return "values" in self.__dict__

    def mark_seen(self) -> None:
        """See `Call`."""
        super().mark_seen()
        user = self.user()
        if user is not None:
            user.let_go(self)

    @property
    def where(self) -> str:
        """The vector and the step, for messages."""
        return f"vector {self.spec.vector_id}, step {self.step}"

    def non_finite(self, ranks: tuple[int, ...], what: str = "") -> NonFiniteGradient:
        """What every rank raises where these ranks contributed NaN or infinity; no rank: a sum has overflowed."""
        return nonfinite.error(self.group, ranks, f"{what} of {self.where}" if what else self.where)

    def out_of_range(self, ranks: tuple[int, ...], what: str) -> NonFiniteGradient:
        """What every rank raises where finite numbers of these ranks have no code; `what` ends the sentence."""
        return nonfinite.out_of_range(self.group, ranks, self.where, what)
