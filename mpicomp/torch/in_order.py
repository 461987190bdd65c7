"""Buckets in flight: begun in one order on all ranks, each as soon as its last gradient has come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from collectives import Communicator
from collectives.errors import NonFiniteGradient, explains_itself
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.devices import current_stream, wait_for


class InOrder:
    """Begins buckets while backward runs, and waits for them.

    An error in backward would end it half-way, on one rank alone; it is kept until `wait`.

    Parameters
    ----------
    reducers : BucketReducers
    comm : Communicator
        Is given a progress thread where MPI allows one.
    begin : method
        Fills a reducer's vector and begins to average it. It is referred to weakly: its object, which has this one, is
        gone with its last user, and with it the hooks on parameters.

    Attributes
    ----------
    begun : int
        Buckets of this step that have begun: the first ones.
    """

    def __init__(self, reducers: BucketReducers, comm: Communicator, begin: Callable[[BucketReducer], None]) -> None:
        self._reducers, self._comm, self._begin = reducers, comm, WeakMethod(begin)
        self.begun = 0
        self._missing: list[int] = []
        self._streams: dict[int, set[Any]] = defaultdict(set)  # on which the gradients of each bucket came
        self._sent: list[tuple[NamedParameter, Tensor, int]] = []  # gradients, and the versions that were sent
        self._error: Exception | None = None

    def complete(self, position: int) -> None:
        """A gradient is complete: begin the next buckets that lack none."""
        if not self._missing:
            self._missing = [len(reducer.bucket.members) for reducer in self._reducers]
        bucket = self._reducers.bucket_of[position]
        self._missing[bucket] -= 1
        self._streams[bucket].add(current_stream(self._reducers.members[position].parameter))
        while self.begun < len(self._reducers) and not self._missing[self.begun] and self._error is None:
            self._begin_next()
        self._comm.advance()

    def complete_all(self) -> None:
        """Begin the others: their gradients will not come any more."""
        while self.begun < len(self._reducers) and self._error is None:
            self._begin_next()

    def find_change(self) -> str:
        """The name of a gradient that was changed after it was sent, or nothing. The change does not count."""
        for member, sent, version in self._sent:
            if member.parameter.grad is not sent or sent._version != version:
                return member.name
        return ""

    def wait(self, take: Callable[[BucketReducer], None]) -> None:
        """Wait for all that have begun, and hand each to `take`.

        Raises
        ------
        NonFiniteGradient
            Of the first bucket in which there was NaN or infinity. All others have ended well.
        Exception
            The first other error, also of beginning a bucket. Where it is this rank's alone, the others get
            CollectiveMismatch.
        """
        begun, self.begun, self._missing = self.begun, 0, []
        error, self._error = self._error, None
        self._sent.clear()
        self._streams.clear()
        for reducer in self._reducers[:begun]:
            try:
                if reducer.wait():
                    take(reducer)
            except NonFiniteGradient as one:
                error = error or one
            except Exception as one:  # noqa: BLE001 - the others are waited for, lest they are in flight for ever
                error = one if error is None or isinstance(error, NonFiniteGradient) else error
        if error is not None and not explains_itself(error):
            self._comm.reject(error, "averaging")  # whose bucket the others have begun
        if error is not None:
            raise error

    def _begin_next(self) -> None:
        begin, reducer = self._begin(), self._reducers[self.begun]
        assert begin is not None
        try:
            wait_for(self._streams.pop(self.begun, ()))
            begin(reducer)
        except Exception as error:  # noqa: BLE001 - raised where the calls are waited for
            self._error = error
            return
        self.begun += 1
        gradients = ((member, member.parameter.grad) for member in reducer.bucket.members)
        self._sent += [(member, one, one._version) for member, one in gradients if one is not None]
