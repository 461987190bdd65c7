"""The parts that an aggregator is composed of, and the vectors that it is started for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from numpy.typing import NDArray

from collectives import Topology
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.spec import VectorSpec

__all__ = ["Feedback", "MessageModel", "Parts", "Reducer", "State", "StateKind", "Synchronize", "VectorSpec"]

Synchronize = Literal["updates", "gradients"]
StateKind = Literal["mean", "owner", "owned", "shared"]
"""What an entry of a state becomes where other ranks go on with it: see `mpicomp.checkpoint.redistribute`."""
State = dict[str, NDArray[Any]]


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
        How the payload goes whatever the topology, unless that is a star; None: as the topology says.
    decoded_once : bool
        The payloads that an all-gather brings are parts of one vector, which is decoded once; False: each is a vector.
    """

    nbytes: Callable[[int, int], int]
    piece_elements: int
    alignment: int = 64
    route: Topology | None = None
    decoded_once: bool = False


class Feedback(Protocol):
    """What a rank carries from step to step.

    Where ranks own parts of the vector it also has ``check_owner(state, where)``, which raises ValueError if a state
    has entries of elements that are another rank's; `where` names rank and vector. Other feedback has no such method.

    Attributes
    ----------
    state_kinds : dict
        Of each key that `state` may have. "mean": a float array whose mean over ranks is what is pending.
        "owner": an array[n], zero but for the elements that the rank owns. "owned": the start and the stop of these
        elements. "shared": equal on all ranks.
    state_nan : str
        The entry of a state that may hold NaN.
    """

    state_kinds: ClassVar[dict[str, StateKind]]
    state_nan: ClassVar[str]

    @property
    def residual(self) -> NDArray[Any] | None:
        """What compression has left out so far: float32 or float64[n]; a tensor where a device encodes."""
        ...

    def check_ready(self) -> None:
        """Raise RuntimeError if an earlier error must be mended first."""
        ...

    def state(self) -> State:
        """Copies of what the next step depends on, by the keys of `state_kinds`."""
        ...

    def like(self) -> State:
        """Of each entry that a state must have, an array of its shape and type."""
        ...

    def load(self, state: State) -> str:
        """Take over a state that has been checked; returns what ranks must compare of it, in words, or ""."""
        ...


class Reducer(Protocol):
    """How payloads get round and meet. Holds buffers, and no aggregator.

    A class that inherits from it leaves out what it has nothing to do in. One that keeps what was before a step also
    has ``undo()``, which takes back what `commit` did last; no step has begun since.
    """

    def prepare(self, step: int) -> None:
        """Do ahead what a step needs no vector for, while the ranks agree on the call.

        It is not always called (never with ``verify=False``), so `steps` must not depend on it.
        """
        return  # a body, without which it would be abstract

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """Write the result of a step to ``call.out``.

        Raises
        ------
        NonFiniteGradient
            On all ranks, with nothing in flight.
        """
        ...

    def commit(self) -> None:
        """The step is good on all ranks: what it made of the residual becomes the next step's.

        After it, as after `roll_back`, no reference to the caller's arrays may be left.
        """
        return

    def roll_back(self) -> None:
        """The step has failed: keep what was before it."""
        return


class Parts(NamedTuple):
    """What an aggregator is composed of.

    Attributes
    ----------
    feedback : Feedback or None
    codec : object
        Values to bytes and back.
    reducer : Reducer
    """

    feedback: Any
    codec: Any
    reducer: Reducer
