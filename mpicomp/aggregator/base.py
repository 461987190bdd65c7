"""What all methods share: the protocol, and the aggregator that checks a vector, agrees with the others and counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, NonFiniteGradient, Traffic, TrafficLog
from collectives.communicator import VERSION
from collectives.consistency.call_check import fingerprint
from collectives.memory import FLOATS, empty_like, flat, widen
from collectives.schedules.plan import Topology
from mpicomp.aggregator import state as states

Synchronize = Literal["updates", "gradients"]
StateKind = Literal["mean", "owner", "owned", "shared"]
"""What an entry of a state becomes where other ranks go on with it: see `mpicomp.checkpoint.redistribute`."""


@dataclass(frozen=True)
class MessageModel:
    """What a method sends for a vector.

    Attributes
    ----------
    nbytes : callable
        ``nbytes(n_elements, weight)``: the payload of a message of that many elements that speaks for that many ranks.
    piece_elements : int
        Longest message.
    alignment : int
        Elements; messages begin at multiples of it.
    route : Topology or None
        How it goes whatever the topology, unless that is a star; None: as the topology says.
    """

    nbytes: Callable[[int, int], int]
    piece_elements: int
    alignment: int = 64
    route: Topology | None = None


class Aggregator(Protocol):
    """One vector's residual, step counter and buffers.

    Attributes
    ----------
    state_kinds : dict
        Of each key that `state_dict` may have. "mean": a float array whose mean over ranks is what is pending.
        "owner": an array[n], zero but for the elements that the rank owns; `load_state_dict` takes those alone.
        "owned": which elements these are, as an array of start and stop. "shared": equal on all ranks.
    """

    state_kinds: ClassVar[dict[str, StateKind]]
    traffic: TrafficLog

    def aggregate(self, vector: Any, out: Any = None) -> Any:
        """Mean of the ranks' vectors as the method approximates it: the same on every rank, to the bit."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Arrays and numbers that `load_state_dict` takes up again exactly."""
        ...

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError if `state` is none that `load_state_dict` takes."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; ValueError, and nothing is changed, if it is not one of this method's."""
        ...


class Algorithm(Protocol):
    """A method's options: a frozen dataclass.

    Attributes
    ----------
    synchronize : "updates" or "gradients"
        What it is best given: the local optimizer's updates, or the gradients.
    """

    synchronize: ClassVar[Synchronize]

    @property
    def uses_tensor_lengths(self) -> bool:
        """Whether `tensor_lengths` make a difference; where not, a vector's tensors need no padding between them."""
        ...

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> Aggregator:
        """State for vectors of one length.

        Parameters
        ----------
        comm : Communicator
        n : int
            Elements.
        dtype : dtype or "bfloat16"
            Of the vectors: float16, bfloat16, float32 or float64.
        vector_id : int
            Tells vectors under one seed apart, so that they do not share random numbers.
        tensor_lengths : sequence of int, optional
            Lengths of parts, such as tensors, that get scales of their own. Each begins at a multiple of 64 elements:
            behind the one before, padded with zeros, which do not count.
        """
        ...

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """What travels between `ranks` for vectors of `n`; packed payloads go in pieces of `piece_bytes` at most."""
        ...


class VectorAggregator(ABC):
    """Base of the aggregators: `aggregate` is here, a method fills in `_reduce`.

    Parameters
    ----------
    algorithm : Algorithm
    comm, n, dtype, vector_id, tensor_lengths
        As in `Algorithm.start`.
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {"method": "shared", "n": "shared", "step": "shared"}
    state_nan: ClassVar[str] = ""  # the entry of a state that may hold NaN

    def __init__(
        self,
        algorithm: Algorithm,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None = None,
    ) -> None:
        self.algorithm, self.comm, self.n, self.vector_id = algorithm, comm, n, vector_id
        self.dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if self.dtype not in FLOATS:
            raise TypeError(f"cannot aggregate vectors of type {self.dtype}: choose one of {', '.join(FLOATS)}")
        if n < 0:
            raise ValueError(f"a vector has 0 or more elements, not {n}")
        self.traffic = TrafficLog()
        self.step = 0
        self._compute: np.dtype[Any] = np.dtype(np.float64 if self.dtype == "float64" else np.float32)
        # NumPy's type of the results: uint16 stands for bfloat16
        self._result_dtype: np.dtype[Any] = np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)
        self._wide = np.empty(n, np.float32) if self.dtype in ("float16", "bfloat16") else None
        self._tag = comm.fixed_tag()
        parts = "" if tensor_lengths is None else f" in {len(tensor_lengths)} tensors {_listed(tensor_lengths)}"
        self._text = f"aggregate of {self.dtype}[{n}]{parts} number {vector_id} by {algorithm} over {comm.route}, "
        self._text += f"wire format {VERSION}, tag {self._tag}"
        self._mark = fingerprint(self._text)

    def aggregate(self, vector: Any, out: Any = None) -> Any:
        """Approximate the mean of the ranks' vectors.

        Parameters
        ----------
        vector : array[n]
            NumPy or DLPack, contiguous, of the aggregator's dtype. Left alone.
        out : array[n], optional
            Overwritten with the result; not the vector itself.

        Returns
        -------
        like vector

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure, NonFiniteGradient
            What `out` holds then is undefined.
        TypeError, ValueError
            This rank's vector cannot be aggregated; the others then raise CollectiveMismatch.
        RuntimeError
            An earlier error spoiled the residual, on all ranks.
        """
        trace = self.comm.trace
        if trace is None:
            return self._aggregate(vector, out)
        named = type(self.algorithm).__name__
        with trace.span("call", "aggregate", method=named, vector=self.vector_id, step=self.step, elements=self.n):
            return self._aggregate(vector, out)

    def _aggregate(self, vector: Any, out: Any) -> Any:
        try:
            self._check_ready()
            values = self._view(vector)
            result = empty_like(vector) if out is None else out
            target = self._view(result)
            if not target.flags.writeable:
                raise ValueError("out is read-only: pass an array that can be written")
            if np.may_share_memory(values, target):
                raise ValueError("out shares memory with the vector: pass another array")
        except (TypeError, ValueError, RuntimeError) as error:
            here = f"rank {self.comm.rank} of {self.comm.size}, vector {self.vector_id}: {error}"
            self.comm.reject(type(error)(here), "aggregate")
        traffic = self.traffic.begin()
        self.comm.agree(self._mark + self.step, self._describe, traffic, meanwhile=self._prepare)
        try:
            if self._wide is not None:
                widen(values, self.dtype, self._wide)
                values = self._wide
            self._reduce(values, target, traffic)
        except NonFiniteGradient:
            raise  # on all ranks, with nothing in flight
        except BaseException as error:
            self.comm.abort(error, self)
            raise
        self.step += 1
        self.traffic.end()
        return result

    def _check_ready(self) -> None:  # noqa: B027 - most methods are always ready
        """Raise RuntimeError if an earlier error must be mended first."""

    def _prepare(self) -> None:  # noqa: B027 - most methods have nothing to prepare
        """Do what this step needs and what changes nothing, while the ranks agree on the call; may be left out."""

    @abstractmethod
    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        """Write the result of this step to `out` (uint16 for bfloat16); `values` is float32 or float64."""

    def _view(self, array: Any) -> NDArray[Any]:
        if (
            type(array) is np.ndarray
            and self._wide is None
            and array.dtype == self._compute
            and array.shape == (self.n,)
            and array.flags.c_contiguous
        ):
            return array  # the common case, at a tenth of the time
        vector = flat(array)
        if vector.dtype != self.dtype:
            raise TypeError(f"the vector has type {vector.dtype}, the aggregator was started for {self.dtype}")
        if vector.values.size != self.n:
            raise ValueError(f"the vector has {vector.values.size} elements, the aggregator was started for {self.n}")
        return vector.values

    def _restored(self, what: str) -> None:
        """From now on the ranks also agree on what they have restored."""
        self._text = f"{self._text.partition(', restored')[0]}, restored with {what}"
        self._mark = fingerprint(self._text)

    def _describe(self) -> str:
        return f"{self._text}, step {self.step}"

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """What the next step depends on beside the counter, by the keys of the state."""
        return {}

    def _like(self) -> dict[str, NDArray[Any]]:
        """Of each of the method's own entries of a state, an array of the shape and type that it must have."""
        return self._arrays()

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on; copies."""
        return self._state(**{key: array.copy() for key, array in self._arrays().items()})

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Look at a state that is not to be loaded yet.

        Raises
        ------
        ValueError
            As `load_state_dict` would.
        """
        self._taken(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, to the bit; all ranks load what was taken at one step.

        Raises
        ------
        ValueError
            The state is another method's, of another length, or not finite. Nothing is changed then.
        """
        taken = self._taken(state)
        for key, array in self._arrays().items():
            array[:] = taken[key]
        self.step = taken["step"]

    def _state(self, **entries: Any) -> dict[str, Any]:
        """A state of this step: what all have, and a method's own entries."""
        return {"method": type(self.algorithm).__name__, "n": self.n, "step": self.step, **entries}

    def _taken(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a state holds, all of it looked at before any is taken over: see `mpicomp.aggregator.state.check`."""
        where = f"rank {self.comm.rank} of {self.comm.size}, vector {self.vector_id}"
        like = self._state(**self._like())
        return states.check(state, like, f"{self.algorithm} for {self.n} elements", where, self.state_nan)


def _listed(tensor_lengths: Sequence[int]) -> str:
    """The lengths, or what stands for them where they would fill a page."""
    if len(tensor_lengths) <= 8:
        return str(list(tensor_lengths))
    return f"[{tensor_lengths[0]}, {tensor_lengths[1]}, ... #{fingerprint(str(list(tensor_lengths))):x}]"
