"""The parts that an aggregator is composed of, and the vectors that it is started for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from collectives import Topology
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.feedback.base import Feedback, State, StateKind
from mpicomp.feedback.rounds import Round

__all__ = [
    "Driver", "Feedback", "MessageModel", "Parts", "Reducer", "Round", "State", "StateKind", "Synchronize",
    "VectorSpec",
]  # fmt: skip

Synchronize = Literal["updates", "gradients"]


@dataclass(frozen=True)
class MessageModel:
    """Sizes and route of the messages that a method sends for a vector.

    Parameters
    ----------
    nbytes : callable
        ``nbytes(n_elements, weight)``: bytes of a message of that many elements, which combines `weight` ranks.
    piece_elements : int
        Longest message.
    alignment : int
        Elements; messages begin at multiples of it.
    route : Topology or None
        Route of the payload over any topology except a star; None: the communicator's topology.
    decoded_once : bool
        The payloads that an all-gather brings are parts of one vector, which is decoded once; False: each is a vector.

    Examples
    --------
    >>> import mpicomp
    >>> model = mpicomp.Marsit().message_model(1_000_000, "float32", ranks=4, piece_bytes=65_536)
    >>> model.nbytes(4096, 2)  # of 4096 elements from 2 ranks
    512
    """

    nbytes: Callable[[int, int], int]
    piece_elements: int
    alignment: int = 64
    route: Topology | None = None
    decoded_once: bool = False


class Reducer(Protocol):
    """Moves the payloads of pieces between ranks and combines them. Holds no callables of a run after it.

    Attributes
    ----------
    side_channel : SideChannel or None
        The channel of the ranks' reports, if payloads travel on it; None: the driver makes one.
    brief : bool
        There is so little to decode that nothing is gained by doing it while messages travel.
    at_once : bool
        The reports and payloads of all ranks travel in the single exchange of `side_channel`.
    array_steps : callable or None
        As in `Driver`; the exact mean has them.

    Examples
    --------
    `mpicomp help extending` has a complete one. This is the reducer of a method:

    >>> import mpicomp
    >>> with mpicomp.Communicator() as comm:
    ...     reducer = mpicomp.QSGD().start(comm, 4).reducer
    >>> type(reducer).__name__, reducer.brief
    ('AllGatherReducer', True)
    """

    side_channel: SideChannel | None = None
    brief: bool = False
    at_once: bool = False

    @property
    def array_steps(self) -> Callable[..., Iterator[bool]] | None:
        """See the attributes."""
        return None

    def prepare_step(self, step: int) -> None:
        """Do ahead the work of a step that needs no vector. Not always called, so `run` must not depend on it."""
        return

    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        """Have each piece encoded and each complete one decoded; call `encoded` once the first round is encoded."""
        ...


class DenseMean(Reducer, Protocol):
    """Reducer that averages vectors in full precision."""

    mean: Any
    """Sums vectors where they are: ``steps(call, values, out, scratch)`` and ``all_finite(call, vector)``."""


class Driver(Protocol):
    """Maker of the steps of one vector. Holds buffers, and no aggregator.

    A subclass overrides only the methods in which it has work to do.

    Attributes
    ----------
    array_steps : callable or None
        ``array_steps(call, source, target)`` makes the steps of two `Flat` arrays on one device, without a copy.
    prepares : bool
        `prepare` has work to do in some steps.
    undoes : bool
        `undo` can take back each step right after its `commit`, as copies of residuals need it.
    """

    prepares: bool = True
    undoes: bool = False
    array_steps: Callable[..., Iterator[bool]] | None = None

    @property
    def can_undo(self) -> bool:
        """True if `undo` can take back the last step."""
        return False

    def undo(self) -> None:
        """Take back the last `commit`; no step has begun since."""
        return  # a body, without which it would be abstract

    def prepare(self, step: int) -> None:
        """Do the part of a step that needs no vector, while the ranks agree on the call.

        It is not always called (never with ``verify=False``), so `steps` must not depend on it.
        """
        return  # a body, without which it would be abstract

    def compares(self, step: int) -> bool:
        """Return True if `steps` runs ``call.compare`` instead of the caller; equal on all ranks.

        Nothing that a step has changed before the ranks have compared the call may be left after `roll_back`.
        """
        return False

    def reads_pieces(self, step: int) -> bool:
        """Return True if a step gets its vector from ``call.read``, where the call has it."""
        return False

    def steps(self, call: VectorCall) -> Iterator[bool]:
        """Write the result of a step to ``call.out``.

        Raises
        ------
        NonFiniteGradient
            On all ranks, with nothing in flight.
        """
        ...

    def commit(self) -> None:
        """Make the residual that the step has written the current one: the step has succeeded on all ranks.

        After this, as after `roll_back`, no reference to the caller's arrays may be left.
        """
        return

    def roll_back(self) -> None:
        """Keep the state of before the step, which has failed."""
        return


class Parts(NamedTuple):
    """Parts that the steps of a method are composed of.

    Attributes
    ----------
    feedback : Feedback
        State of a rank, and its encoding and decoding of pieces.
    reducer : Reducer
        Moves the bytes between ranks.
    dense : DenseMean or None
        A `mpicomp.reducers.full_precision_mean.FullPrecisionMean`, which averages the vectors of steps in full
        precision, see `Algorithm.is_dense`; None: there are no such steps.

    Examples
    --------
    >>> import mpicomp
    >>> from mpicomp.aggregator.algorithm import VectorSpec
    >>> with mpicomp.Communicator() as comm:
    ...     parts = mpicomp.QSGD(levels=7).parts(comm, VectorSpec(4, "float32"))
    >>> list(parts.feedback.residuals), type(parts.reducer).__name__, parts.dense
    (['residual'], 'AllGatherReducer', None)
    """

    feedback: Feedback
    reducer: Reducer
    dense: DenseMean | None = None
