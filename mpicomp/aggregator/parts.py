"""The parts that an aggregator is composed of, and the vectors that it is started for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from collectives import Topology
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback.base import Feedback, State, StateKind

__all__ = ["Feedback", "MessageModel", "Parts", "Reducer", "State", "StateKind", "Synchronize", "VectorSpec"]

Synchronize = Literal["updates", "gradients"]


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


class Reducer(Protocol):
    """How payloads get round and meet. Holds buffers, and no aggregator.

    A class that inherits from it leaves out the methods in which it has nothing to do.
    """

    @property
    def can_undo(self) -> bool:
        """Whether `undo` can take back the last step."""
        return False

    def undo(self) -> None:
        """Take back what `commit` did last; no step has begun since."""
        return  # a body, without which it would be abstract

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
