"""One step of one vector, from `begin` to its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol
from weakref import ref

from collectives import Communicator, NonFiniteGradient, Traffic
from collectives.annotations import AnyArray, FloatArray, override
from collectives.arrays.elements import Combine
from collectives.consistency.descriptions import Description, fingerprint
from collectives.execution.call import Call
from collectives.progress.polling import Backoff
from mpicomp.aggregator.difference import Difference
from mpicomp.aggregator.spec import VectorSpec, tensors_listed
from mpicomp.feedback import nonfinite
from mpicomp.feedback.packed_signs import PackedSigns

if TYPE_CHECKING:
    from mpicomp.aggregator.base import Aggregator


class Compare(Protocol):
    """Comparison of a call, whose messages also sum a small vector; see `Communicator.check`."""

    def __call__(self, *, values: AnyArray, sums: AnyArray, combine: Combine) -> Iterator[bool]:
        """Return the steps."""
        ...


@dataclass(frozen=True)
class CallText:
    """Words for the calls of an aggregator, which keep the aggregator itself not alive.

    Attributes
    ----------
    group : Communicator
    method : object
        Options of the method.
    spec : VectorSpec
    tag : int
        Tag of the aggregator.
    text : str
        Description of the calls without their step.
    restored : str
        Description of the parts of a restored state that the ranks compare.
    """

    group: Communicator
    method: object
    spec: VectorSpec
    tag: int
    text: str
    restored: str = ""

    @cached_property
    def fingerprint(self) -> int:
        """Bits that stand for the text, without a step."""
        return fingerprint(self._complete)

    @property
    def _complete(self) -> str:
        return f"{self.text}, restored with {self.restored}" if self.restored else self.text

    def at(self, step: int) -> Description:
        """Return the description of the call of a step, which only errors and warnings need."""
        spec, by = self.spec, type(self.method).__name__
        options = [one.name for one in fields(self.method)] if is_dataclass(self.method) else list[str]()
        kind = f"{spec.dtype}[{spec.n}]"
        return Description(
            f"{self._complete}, step {step}",
            f"aggregate by {by}",
            (
                kind,
                (f"{spec.vector_id}", f"vector of {kind} number {spec.vector_id} by {by}"),
                f"in {tensors_listed(spec.tensor_lengths)}" if spec.tensor_lengths is not None else "no tensor_lengths",
                *(f"{name}={getattr(self.method, name)!r}" for name in options),
                *self.group.routes.parts,
                f"aggregator {self.tag} of the communicator",
                f"step {step}",
                f"restored with {self.restored}" if self.restored else "not restored",
            ),
        )


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
    compare : Compare or None
        Comparison of the call, while the ranks have yet to compare it.
    read : callable or None
        ``read(elements)`` returns a piece of the vector, in memory that the next call overwrites, for encoders that
        read each piece once; `values` is the vector as well.
    accepts_packed : bool
        The result may be left in `packed` besides `out`.
    packed : PackedSigns or None
    """

    group: Communicator
    wide: FloatArray | None = None
    compare: Compare | None = None
    read: Callable[[range], FloatArray] | None = None
    accepts_packed = False
    packed: PackedSigns | None = None

    def __init__(
        self,
        text: CallText,
        step: int,
        user: ref[Aggregator],
        vector: FloatArray | None,
        difference: Difference | None,
        out: FloatArray,
        traffic: Traffic,
    ) -> None:
        # not that of `Call`, whose attribute `name` would keep this call in a cycle
        Backoff.__init__(self, text.group, self.name, traffic.clock)
        self._text, self.spec, self.step, self.user = text, text.spec, step, user
        self.label = text.text
        self._vector, self.difference, self.out, self.traffic = vector, difference, out, traffic

    @override
    def name(self) -> str:
        return self._text.at(self.step)

    @override
    def brief(self) -> str:
        return f"{super().brief()}, step {self.step}"

    @property
    def values(self) -> FloatArray:
        """See the attributes."""
        if self._vector is None and self.read is not None:
            self._vector = self.read(range(self.spec.n)).copy()
        if self._vector is None:
            assert self.difference is not None
            self._vector = self.difference.take()
        return self._vector

    @values.setter
    def values(self, values: FloatArray) -> None:
        self._vector = values

    @property
    def is_taken(self) -> bool:
        """True once the vector has been computed; the tensors of `difference` may be gone then."""
        return self._vector is not None

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

    def out_of_range(self, ranks: tuple[int, ...], reason: str) -> NonFiniteGradient:
        """Return the error for finite numbers of these ranks that have no code; `reason` ends its sentence."""
        return nonfinite.out_of_range(self.group, ranks, self.where, reason)
