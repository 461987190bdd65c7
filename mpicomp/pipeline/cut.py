"""One end of a cut: how the stage before it, or the one after it, trades rows with its neighbour.

Forward go activations, back their gradients. In evaluation activations go forward uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from mpicomp.pipeline.activations import Coding, Compression, Deltas, Direct
from mpicomp.pipeline.link import Incoming, Outgoing
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.stamps import differing

_ACTIVATIONS, _GRADIENTS, _EVALUATION, _TAGS = 0, 2, 4, 6  # a link uses its tag and the next one

Compressions = tuple[Compression, Compression]


def check_compressions(compressions: Compressions) -> None:
    """Raise TypeError unless activations and gradients can travel like this."""
    if isinstance(compressions[1], Deltas):
        raise TypeError("gradients are no messages of examples that settle: pass Direct as backward=, not Deltas")


class CutEnd:
    """What both ends of a cut have.

    Parameters
    ----------
    comm : Communicator
    neighbour : int
        The rank of the other end.
    cut : int
        Its number. Two ranks may share two cuts, if their numbers are an even one and an odd one.
    compressions : (Compression, Compression)
        Of activations and of gradients; the same on both ends.
    seed : int
        Of stochastic rounding; the same on both ends.

    Attributes
    ----------
    codings : dict of str to Coding
        Of "activations" and "gradients".
    activations, gradients, evaluated : Outgoing or Incoming
        Messages in steps, and activations in evaluation.
    """

    _name: str
    activations: Outgoing | Incoming
    gradients: Outgoing | Incoming
    evaluated: Outgoing | Incoming

    def __init__(self, comm: Communicator, neighbour: int, cut: int, compressions: Compressions, seed: int) -> None:
        forward, backward = compressions
        self._comm, self._neighbour, self._tag = comm, neighbour, cut % 2 * _TAGS
        self._activations = forward.start(seed, 2 * cut, self._name)
        self._gradients = backward.start(seed, 2 * cut + 1, self._name)
        self.codings: dict[str, Coding] = {"activations": self._activations, "gradients": self._gradients}

    # Steps -----------------------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> tuple[int, int]:
        """In steps from this end, of activations and of gradients."""
        forward, backward = (
            link.bytes_sent if isinstance(link, Outgoing) else 0 for link in (self.activations, self.gradients)
        )
        return forward, backward

    def know_shapes(self) -> None:
        """Gradients have the shape of the activations that have passed."""
        self.gradients.row_shape = self.activations.row_shape

    def finish(self) -> None:
        """Wait for what is still being sent: the step ends."""
        self.activations.finish()
        self.gradients.finish()

    def finish_evaluation(self) -> None:
        """Wait for what is still being sent; the next batch that is evaluated may have rows of another shape."""
        self.evaluated.finish()
        self.evaluated.forget_shape()

    def check(self, ids: Ids | None) -> None:
        """Raise TypeError or ValueError unless a step of these examples can be coded."""
        for coding in self.codings.values():
            coding.check(ids)

    def prefetch(self, ids: Ids) -> None:
        """These examples are the next."""
        self._activations.prefetch(ids)

    def commit(self) -> None:
        """The step has ended well; raises OSError where what is to be kept cannot be written."""
        for coding in self.codings.values():
            coding.commit()

    def roll_back(self) -> None:
        """The step has failed somewhere."""
        for coding in self.codings.values():
            coding.roll_back()

    # What is kept ----------------------------------------------------------------------------------------------------

    def checksum(self) -> int:
        """Of what was kept since the last call, as a signed number; 0 where it is not time for one."""
        return int(np.uint64(self._activations.checksum() or 0).astype(np.int64))

    def digest(self) -> int:
        """Of all that is kept, equal on both ends."""
        return self._activations.digest()

    def forget_messages(self) -> None:
        """Have all messages sent in full precision again; call it on both ends."""
        stamps = self._activations.stamps()
        if stamps is not None:
            rows = np.flatnonzero(stamps)
            self._activations.forget(rows, stamps[rows])
            self._activations.checksum()

    def compare(self) -> int:
        """Have both ends forget the examples whose visits they count differently; how many; both ends call it."""
        stamps = self._activations.stamps()
        if stamps is None:
            return 0
        theirs = self._exchanged(stamps.view(np.int32)).view(np.uint32)
        rows = differing(stamps, theirs)
        self._activations.forget(rows, theirs[rows])
        return rows.size

    def _exchanged(self, mine: NDArray[np.int32]) -> NDArray[np.int32]:
        theirs = np.empty_like(mine)
        receiving = self._comm.irecv(theirs, self._neighbour, self._tag + _EVALUATION)
        self._comm.send(mine, self._neighbour, self._tag + _EVALUATION)
        receiving.wait()
        return theirs

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs of each coding."""
        return {name: coding.state_dict() for name, coding in self.codings.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; ValueError or KeyError if it is of something else."""
        for name, coding in self.codings.items():
            coding.load_state_dict(state[name])

    def close(self) -> None:
        """Let go of what is kept, and of files."""
        for coding in self.codings.values():
            coding.close()


class Upstream(CutEnd):
    """The end of the stage before a cut: it sends activations, and receives gradients."""

    _name = "before"
    activations: Outgoing
    gradients: Incoming
    evaluated: Outgoing

    def __init__(self, comm: Communicator, neighbour: int, cut: int, compressions: Compressions, seed: int) -> None:
        super().__init__(comm, neighbour, cut, compressions, seed)
        self.activations = Outgoing(comm, neighbour, self._tag + _ACTIVATIONS, self._activations)
        self.gradients = Incoming(comm, neighbour, self._tag + _GRADIENTS, self._gradients, tells=False)
        self.evaluated = Outgoing(comm, neighbour, self._tag + _EVALUATION, Direct().start(0, 0, ""))


class Downstream(CutEnd):
    """The end of the stage after a cut: it receives activations, and sends gradients."""

    _name = "after"
    activations: Incoming
    gradients: Outgoing
    evaluated: Incoming

    def __init__(self, comm: Communicator, neighbour: int, cut: int, compressions: Compressions, seed: int) -> None:
        super().__init__(comm, neighbour, cut, compressions, seed)
        self.activations = Incoming(comm, neighbour, self._tag + _ACTIVATIONS, self._activations)
        self.gradients = Outgoing(comm, neighbour, self._tag + _GRADIENTS, self._gradients, tells=False)
        self.evaluated = Incoming(comm, neighbour, self._tag + _EVALUATION, Direct().start(0, 0, ""))
