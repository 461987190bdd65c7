"""Buckets in flight: begun in one order on all ranks, each as soon as its last gradient has come.

The last bucket waits for the step. It carries the ranks' agreement on the step, to which belongs all that happens
between backward and step. Its gradients are the last ones that backward brings, so little time is lost.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from collectives import Communicator
from collectives.errors import NonFiniteGradient, explains_itself
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.devices import current_stream, wait_for
from mpicomp.torch.optimizer.gradient_hooks import SentGradients
from mpicomp.torch.optimizer.step_agreement import StepAgreement

_log = logging.getLogger("mpicomp")
_warned = False

Fill = Callable[[BucketReducer], bool]
"""Fills a reducer's vector, and returns True; or takes the values as their own mean, and returns False."""


class InOrder:
    """Begins buckets while backward runs, and waits for them.

    An error in backward would end it half-way, on one rank alone; it is kept until `finish`.

    Parameters
    ----------
    reducers : BucketReducers
    comm : Communicator
        Is given a progress thread where MPI allows one.
    fill : method
        Fills a reducer's vector; see `Fill`. It is referred to weakly: its object, which has this one, is gone with its
        last user, and with it the hooks on parameters.
    agreement : StepAgreement
        Travels with the last bucket.

    Attributes
    ----------
    begun : int
        Buckets of this step that have begun: the first ones.
    """

    def __init__(self, reducers: BucketReducers, comm: Communicator, fill: Fill, agreement: StepAgreement) -> None:
        self._reducers, self._comm, self._fill, self._agreement = reducers, comm, WeakMethod(fill), agreement
        self.begun = 0
        self._missing: list[int] = []
        self._streams: dict[int, set[Any]] = defaultdict(set)  # on which the gradients of each bucket came
        self._sent = SentGradients()
        self._refusal: Exception | None = None  # why this rank cannot fill a bucket
        self._failure: Exception | None = None  # by which a call could not begin

    def complete(self, position: int) -> None:
        """A gradient is complete: begin the next buckets that lack none."""
        if not self._missing:
            self._missing = [len(reducer.bucket.members) for reducer in self._reducers]
        bucket = self._reducers.bucket_of[position]
        self._missing[bucket] -= 1
        self._streams[bucket].add(current_stream(self._reducers.members[position].parameter))
        while self.begun < len(self._reducers) - 1 and not self._missing[self.begun] and self._is_well:
            reducer = self._reducers[self.begun]
            self._begin_next()
            self._sent.add(reducer.bucket.members, reducer.mean)
        self._comm.advance()

    @property
    def _is_well(self) -> bool:
        return self._refusal is None and self._failure is None

    def find_change(self) -> str:
        """Return the name of a gradient that was changed after it was sent, or an empty string."""
        return self._sent.find_change()

    def finish(
        self,
        take: Callable[[BucketReducer], None] = lambda reducer: None,
        refusal: Exception | None = None,
        drops: bool = False,
        emptied: bool = False,
    ) -> None:
        """Begin the remaining buckets, wait for all, and hand each to `take` once all ranks are known to make the step.

        Parameters
        ----------
        take
            Called with every reducer whose ``mean`` is there.
        refusal
            Why this rank cannot make the step. It takes part in the calls that the others have begun, by zeros.
        drops
            Whether this rank drops the step; if all do, no reducer is taken.
        emptied
            Whether this rank has dropped the gradients of the step that it makes; an error if all have.

        Raises
        ------
        Exception
            `refusal`, or the error by which a bucket could not be filled.
        NonFiniteGradient
            Of the first bucket in which there was NaN or infinity. All others have been taken.
        CollectiveMismatch
            Another rank refuses the step, or the ranks differ: see `StepAgreement.conclude`.
        """
        refusal = refusal or self._refusal
        while self.begun < len(self._reducers) and self._failure is None:
            self._begin_next(refusal, drops, emptied)
        refusal = refusal or self._refusal
        begun, self.begun, self._missing = self.begun, 0, []
        failure, self._failure, self._refusal = self._failure, None, None
        self._sent.clear()
        self._streams.clear()
        ended: list[BucketReducer] = []
        taken = 0
        for reducer in self._reducers[:begun]:
            try:
                if reducer.wait():
                    ended.append(reducer)
                while taken < len(ended) and self._agreement.is_settled:
                    take(ended[taken])
                    taken += 1
            except NonFiniteGradient as one:
                failure = failure or one
            except Exception as one:  # noqa: BLE001 - the others are waited for, lest they are in flight for ever
                failure = one if failure is None or isinstance(failure, NonFiniteGradient) else failure
        if failure is None or isinstance(failure, NonFiniteGradient):
            made = False
            try:
                made = self._agreement.conclude(refusal, drops, emptied)
            finally:
                refusal = None  # see below
                for reducer in ended[taken:]:
                    take(reducer) if made else reducer.undo()
        else:
            for reducer in ended[taken:]:
                reducer.undo()
        if failure is not None and not explains_itself(failure):
            self._comm.reject(failure, "averaging")  # whose bucket the others have begun
        if failure is None or (drops and isinstance(failure, NonFiniteGradient)):
            return
        try:
            raise failure
        finally:
            failure = None  # its traceback has this frame, and they would keep each other and the optimizer

    def _begin_next(self, refusal: Exception | None = None, drops: bool = False, emptied: bool = False) -> None:
        reducer = self._reducers[self.begun]
        sends = reducer.aggregator.comm.size > 1
        idle = drops or refusal is not None
        try:
            wait_for(self._streams.pop(self.begun, ()))
            fill = self._fill()
            assert fill is not None
            if not idle:
                sends = fill(reducer)
        except Exception as error:  # noqa: BLE001 - raised by `finish`, on all ranks in the same step
            self._refusal, idle = error, True
        if idle:
            reducer.clear()
        if self.begun == len(self._reducers) - 1:
            self._agreement.attach(reducer.aggregator, bool(refusal or self._refusal), drops, emptied)
        try:
            if sends:
                reducer.begin()
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            self._failure = error
            return
        self.begun += 1


def overlap_by_thread(comm: Communicator, on_device: bool = False) -> bool:
    """Give the communicator a progress thread; where there is none, return False, and say once what happens instead.

    on_device : whether the model is on a device.
    """
    global _warned
    started = comm.start_progress_thread()
    if not started and comm.lacks_thread_support and not _warned:
        _warned = True
        _log.warning(
            "%s: MPI was started without MPI_THREAD_MULTIPLE, so that communication goes on only %s; start it by "
            "mpi4py.rc.thread_level = 'multiple', the default",
            comm.here, "in step()" if on_device else "where backward calls hooks"
        )  # fmt: skip
    return started
