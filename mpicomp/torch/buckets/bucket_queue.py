"""Queue of buckets that are averaged while backward goes on, for the optimizers and for the DDP hook."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from weakref import WeakMethod

import torch
from torch import Tensor

from collectives import Communicator, Handle
from collectives.errors import NonFiniteGradient
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.devices import stream_at, wait_for

Fill = Callable[[BucketReducer, bool], bool]
"""Write a reducer's vector and return True, or take the values as their own mean and return False.

The flag is True if the bucket starts during backward.
"""
OnEnd = Callable[[Exception | None], None]

_log = logging.getLogger("mpicomp")
_warned = False


class BucketQueue:
    """Averages flat buckets, started in one order on all ranks.

    1. `count` counts slices of a bucket: its parameters' gradients are there. A bucket is complete with the last one.
    2. `start_complete` starts complete buckets in the order of `reducers`, although they become complete in another
       order here, and the last one not before `start_rest`. `push` starts a bucket as soon as it is complete: the
       caller pushes in the same order on all ranks.
    3. `collect` waits for all buckets, hands them over and empties the queue.

    An error raised in backward would end it half-way, on one rank alone. So errors are kept for `collect`; a bucket
    that cannot be filled is sent as zeros, since the other ranks may have started it.

    Parameters
    ----------
    reducers
        The same on all ranks. Buckets may be added while no bucket is in flight.
    fill
        Method that fills a vector just before its bucket starts; None: vectors are full when they are pushed. It is
        referred to weakly: its object, which has this queue, is gone with its last user, and so are its hooks.
    in_background
        False: a bucket with `on_end` is averaged within `push`.

    Attributes
    ----------
    n_started : int
        Buckets started since the last `collect`; in order, these are the first ones.
    fill_error : Exception or None
        First error by which a bucket could not be filled.
    """

    def __init__(
        self,
        reducers: Sequence[BucketReducer],
        comm: Communicator,
        fill: Fill | None = None,
        in_background: bool = True,
    ) -> None:
        self._reducers, self._comm, self._in_background = reducers, comm, in_background
        self._fill = None if fill is None else WeakMethod(fill)
        self._missing: dict[int, int] = {}  # slices that incomplete buckets lack
        self._streams: dict[int, set[torch.cuda.Stream]] = defaultdict(set)  # on which each bucket's slices were made
        self._reset()

    def _reset(self) -> None:
        self.n_started = 0
        self.fill_error: Exception | None = None
        self._errors: dict[int, Exception] = {}  # by which buckets failed to start, or have ended
        self._handles: list[Handle] = []
        self._missing.clear()
        self._streams.clear()

    def push(self, index: int, n_slices: int, on_end: OnEnd) -> None:
        """Count slices of a bucket, and start it if it is complete.

        The progress thread calls `on_end` when the bucket has ended, with its error or None.
        """
        if self.count(index, n_slices):
            self._start(index, True, False, on_end)

    def count(self, index: int, n_slices: int = 1, made: Tensor | None = None) -> bool:
        """Count slices of a bucket, `made` on its GPU's current stream; return True if the bucket is complete."""
        left = self._missing.get(index)
        self._missing[index] = left = (len(self._reducers[index].bucket.members) if left is None else left) - n_slices
        if made is not None and made.is_cuda:
            gpu = made.get_device()
            self._streams[index].add(stream_at(gpu, torch._C._cuda_getCurrentRawStream(gpu)))
        return not left

    def start_complete(self) -> None:
        """Start the buckets in order that are due."""
        last, missing, errors = len(self._reducers) - 1, self._missing, self._errors
        while self.n_started < last and missing.get(self.n_started) == 0 and self.fill_error is None and not errors:
            self._start(self.n_started, True, False)

    def start_rest(self, silent: bool, before_last: Callable[[BucketReducer], None]) -> None:
        """Start all buckets that have not started, in order; call `before_last` just before the last one starts.

        A `silent` rank takes no part in the step, and sends zeros.
        """
        while self.n_started < len(self._reducers) and not self._errors:
            is_last = self.n_started == len(self._reducers) - 1
            self._start(self.n_started, False, silent, before=before_last if is_last else None)

    def collect(
        self, take: Callable[[BucketReducer], None], is_settled: Callable[[], bool]
    ) -> tuple[list[BucketReducer], Exception | None]:
        """Wait for all buckets that have started, and empty the queue.

        As soon as `is_settled` returns True the means count, and `take` is called with each reducer that has one.
        Return the other reducers with a mean, and the first error, rather another one than NonFiniteGradient.
        """
        started, errors = self._reducers[: self.n_started], self._errors
        self._reset()
        ended: list[BucketReducer] = []
        taken = 0
        for index, reducer in enumerate(started):
            try:
                if reducer.wait():
                    ended.append(reducer)
                while taken < len(ended) and is_settled():
                    take(ended[taken])
                    taken += 1
            except Exception as error:  # noqa: BLE001 - the other buckets are waited for, lest they stay in flight
                errors.setdefault(index, error)
        try:
            return ended[taken:], _first(errors)
        finally:
            del errors  # their tracebacks have this frame, and they would keep each other

    def wait(self) -> None:
        """Wait for the buckets with `on_end` in such a way that signals are handled meanwhile."""
        handles, self._handles = self._handles, []
        for handle in handles:
            with suppress(Exception):  # `on_end` has been given the error
                handle.wait()

    def take_failure(self) -> Exception | None:
        """Empty a queue whose buckets have ended, and return the error as `collect` does."""
        errors = self._errors
        self._reset()
        return _first(errors)

    @property
    def incomplete(self) -> list[int]:
        """Buckets of which some slices have been counted."""
        return [index for index, left in self._missing.items() if left]

    def _start(
        self,
        index: int,
        early: bool,
        silent: bool,
        on_end: OnEnd | None = None,
        before: Callable[[BucketReducer], None] | None = None,
    ) -> None:
        reducer, sends = self._reducers[index], True
        try:
            wait_for(self._streams.pop(index, ()))
            if self._fill is not None and not silent:
                fill = self._fill()
                assert fill is not None
                sends = fill(reducer, early)
        except Exception as error:  # noqa: BLE001 - raised by whoever collects, on all ranks in the same step
            self.fill_error, silent = error, True
        if silent:
            reducer.clear()
            sends = self._comm.size > 1
        if before is not None:
            before(reducer)
        self._missing.pop(index, None)
        self.n_started += 1
        if on_end is not None and not self._in_background:
            self._end(index, reducer.aggregate, on_end)
            return
        try:
            handle = reducer.begin() if sends else None
        except Exception as error:  # noqa: BLE001 - kept for `collect`
            self._errors[index] = error
            if on_end is not None:
                on_end(error)
            return
        if handle is not None and on_end is not None:
            self._handles.append(handle)
            # with the stream the call ends early; `wait` lets the stream of the progress thread wait
            handle.then(lambda _: self._end(index, reducer.wait, on_end), reducer.stream)

    def _end(self, index: int, finish: Callable[[], object], on_end: OnEnd) -> None:
        try:
            finish()
        except Exception as error:  # noqa: BLE001 - kept for `take_failure`
            self._errors[index] = error
        on_end(self._errors.get(index))


def worse(one: Exception | None, other: Exception | None) -> Exception | None:
    """Return the error to raise of two, or None: rather another one than NonFiniteGradient, and rather the first."""
    if one is None or (isinstance(one, NonFiniteGradient) and other is not None):
        return other if one is None or not isinstance(other, NonFiniteGradient) else one
    return one


def _first(errors: dict[int, Exception]) -> Exception | None:
    """Return the error to raise of several buckets."""
    return reduce(worse, (errors[index] for index in sorted(errors)), None)


def overlap_by_thread(comm: Communicator, on_device: bool = False) -> bool:
    """Start the communicator's progress thread; where MPI allows none, return False and warn once."""
    global _warned
    started = comm.start_progress_thread()
    if not started and comm.calls.lacks_thread_support and not _warned:
        _warned = True
        _log.warning(
            "%s: MPI was started without MPI_THREAD_MULTIPLE, so that communication goes on only %s; start it by "
            "mpi4py.rc.thread_level = 'multiple', the default",
            comm.here, "in step()" if on_device else "where backward calls hooks"
        )  # fmt: skip
    return started
