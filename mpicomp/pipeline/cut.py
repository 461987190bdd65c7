"""One end of a cut between stages, which exchanges rows with its neighbour.

Activations go forward, and their gradients back. In evaluation activations go forward uncompressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import numpy as np

from collectives import Communicator
from mpicomp.pipeline.activations import Compression, Deltas, Direct
from mpicomp.pipeline.agreement import UNKNOWN, failure_text
from mpicomp.pipeline.coding import Coding, CodingPlace
from mpicomp.pipeline.messages import REFUSABLE, Incoming, Outgoing, settle
from mpicomp.pipeline.store_rows import Ids
from mpicomp.pipeline.store_states import State

_ACTIVATIONS, _GRADIENTS, _EVALUATION, _TAGS = 0, 2, 4, 6  # a link uses its tag and the next one
_DIRECTIONS = ("activations", "gradients")

Compressions = tuple[Compression, Compression]


def check_compressions(compressions: Compressions) -> None:
    """Raise TypeError unless activations and gradients can travel like this."""
    if isinstance(compressions[1], Deltas):
        raise TypeError("gradients are no messages of examples that settle: pass Direct as backward=, not Deltas")


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, and then raise the first of their errors."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except REFUSABLE as error:  # the other ends rely on the calls that are left
            first = first or error
    if first is not None:
        raise first


class CutEnd:
    """Base of both ends of a cut, which have equal arguments but for the `neighbour`'s rank."""

    _name: ClassVar[str]
    _links: ClassVar[tuple[type[Outgoing | Incoming], type[Outgoing | Incoming]]]  # forward, and backward
    activations: Outgoing | Incoming  # in steps
    gradients: Outgoing | Incoming
    evaluated: Outgoing | Incoming  # activations in evaluation

    def __init__(
        self, comm: Communicator, neighbour: int, cut: int, compressions: Compressions, seed: int, pipeline: int
    ) -> None:
        # two ranks may share two cuts, if one has an even number and the other an odd one
        self._comm, self._neighbour, self._tag = comm, neighbour, cut % 2 * _TAGS
        # pipelines next to each other have different numbers: each draws random words of its own
        self._cut, self._compressions, self._seed, self._pipeline = cut, compressions, seed, pipeline
        self.lost = ""  # why no step can go on from the messages that are kept; empty: it can
        self.codings: dict[str, Coding] = {}  # also of "activations 1" if several tensors travel
        for direction in range(len(_DIRECTIONS)):
            self._coding(direction, 0)
        forward, backward, tag = *self._links, self._tag
        self.activations = forward(comm, neighbour, tag + _ACTIVATIONS, partial(self._coding, 0))
        self.gradients = backward(comm, neighbour, tag + _GRADIENTS, partial(self._coding, 1), announced=False)
        self.evaluated = forward(comm, neighbour, tag + _EVALUATION, _exact)

    def _coding(self, direction: int, part: int) -> Coding:
        """Return the coding of a tensor, by its number among those that travel together."""
        name = f"{_DIRECTIONS[direction]} {part}" if part else _DIRECTIONS[direction]
        if name not in self.codings:
            place = CodingPlace(2 * self._cut + direction, self._name, part, self._seed, self._pipeline)
            self.codings[name] = self._compressions[direction].start(place)
        return self.codings[name]

    @property
    def _keeping(self) -> list[Coding]:
        """The codings that may keep messages."""
        return [coding for name, coding in self.codings.items() if name.startswith(_DIRECTIONS[0])]

    # Steps -----------------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """Bytes of activations and of gradients that this end has sent in steps."""
        forward, backward = (
            link.bytes_sent if isinstance(link, Outgoing) else 0 for link in (self.activations, self.gradients)
        )
        return forward, backward

    def share_layout(self) -> None:
        """Give gradients the layout of the activations that have passed."""
        layout = self.activations.layout
        if layout is not None and self.gradients.layout is None:
            self.gradients.layout = layout.gradients

    def finish(self) -> None:
        """Wait for the messages in flight: the step ends."""
        self.activations.finish()
        self.gradients.finish()

    def finish_evaluation(self) -> None:
        """Wait for the messages in flight; the next batch that is evaluated may have another layout."""
        self.evaluated.finish()
        self.evaluated.forget_layout()

    def check(self, ids: Ids | None) -> None:
        """Raise TypeError or ValueError unless a step of these examples can be coded."""
        if self.lost:
            raise ValueError(self.lost)
        for coding in self.codings.values():
            coding.check(ids)

    def prefetch(self, ids: Ids) -> None:
        """Announce the examples of a micro-batch to come."""
        for coding in self._keeping:
            coding.prefetch(ids)

    def commit(self, step: int) -> None:
        """End the step with this number, which succeeded; `lost` has the reason where its messages cannot be kept."""
        for coding in self.codings.values():
            try:
                coding.commit()
            except REFUSABLE as error:  # too late to take the step back on the other end
                self.lost = (
                    f"messages of step {step} could not be kept ({error}): load the last checkpoint, or call "
                    "forget_messages() on all ranks"
                )

    def roll_back(self) -> None:
        """End a step that failed on some rank."""
        for coding in self.codings.values():
            coding.roll_back()

    # Kept messages ---------------------------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Return the sum of messages kept since the last call, as a signed number; 0 where it is not time for one.

        UNKNOWN, and `lost` has the reason, where the messages could not be written.
        """
        try:
            found = sum(coding.checksum() or 0 for coding in self._keeping)
        except REFUSABLE as error:  # the other end waits for the checksum
            self.lost = failure_text(error) or ""
            return UNKNOWN
        return int(np.uint64(found % 2**64).astype(np.int64))

    def digest(self) -> int:
        """Return 63 bits for all messages that are kept, equal on both ends."""
        return sum(coding.digest() for coding in self._keeping) % 2**63

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on both ends."""
        call_all((*(coding.forget_all for coding in self._keeping), self.begin_again))
        self.lost = ""

    def compare(self) -> int:
        """Have both ends forget the examples whose messages they do not share; returns their number; on both ends."""
        codings = [coding for coding in self._keeping if coding.pairing() is not None]
        try:
            return settle(self._comm, self._neighbour, self._tag + _EVALUATION, codings) if codings else 0
        except REFUSABLE as error:  # the other end has forgotten them: payloads would have different sizes
            self.lost = self.lost or failure_text(error) or ""
            raise

    def state_dict(self) -> State:
        """Return the state of each coding for a checkpoint."""
        return {name: coding.state_dict() for name, coding in self.codings.items()}

    def load_state_dict(self, state: State) -> None:
        """Go on from `state_dict`; ValueError or KeyError if the state is of another cut."""
        for name in [name for name in self.codings if name not in state and name not in _DIRECTIONS]:
            self.codings.pop(name).close()  # of a tensor that the state does not have
        for name in (*_DIRECTIONS, *(name for name in state if name not in _DIRECTIONS)):
            which, _, part = name.partition(" ")
            self._coding(_DIRECTIONS.index(which), int(part or 0)).load_state_dict(state[name])
        self.lost = ""

    def begin_again(self) -> None:
        """Have the next message announced, and so the messages of both ends settled; call it on both ends."""
        self.activations.forget_layout()
        self.gradients.forget_layout()
        call_all(coding.begin_checksum for coding in self._keeping)

    def close(self) -> None:
        """Release the messages and their files."""
        call_all(coding.close for coding in self.codings.values())


class Upstream(CutEnd):
    """End of the stage before a cut: it sends activations, and receives gradients."""

    _name = "before"
    _links = Outgoing, Incoming
    activations: Outgoing
    gradients: Incoming
    evaluated: Outgoing


class Downstream(CutEnd):
    """End of the stage after a cut: it receives activations, and sends gradients."""

    _name = "after"
    _links = Incoming, Outgoing
    activations: Incoming
    gradients: Outgoing
    evaluated: Incoming


def _exact(_: int) -> Coding:
    return Direct().start(CodingPlace(0))
