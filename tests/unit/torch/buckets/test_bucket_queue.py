"""The contract of a queue of buckets: one order on all ranks, errors kept until they are collected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpicomp import Communicator, Dense, run_local
from mpicomp.torch.buckets.bucket_layout import make_bucket
from mpicomp.torch.buckets.bucket_queue import BucketQueue
from mpicomp.torch.buckets.bucket_reducer import BucketReducer, VectorPair
from mpicomp.torch.parameters import NamedParameter

BUCKETS, PARAMETERS = 3, 2


class Owner:
    """Three buckets of two parameters; bucket k of rank r is filled with 10 k + r."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.filled: list[tuple[int, bool]] = []
        self.fails_at = -1
        self.reducers = [self._reducer(index) for index in range(BUCKETS)]
        self.queue = BucketQueue(self.reducers, comm, self.fill)

    def _reducer(self, index: int) -> BucketReducer:
        members = [NamedParameter(f"{index}.{i}", torch.nn.Parameter(torch.zeros(5))) for i in range(PARAMETERS)]
        bucket = make_bucket(index, members)
        return BucketReducer(bucket, VectorPair(bucket), Dense(), self.comm)

    def fill(self, reducer: BucketReducer, early: bool) -> bool:
        index = reducer.bucket.index
        if index == self.fails_at:
            raise ArithmeticError("no values")
        self.filled.append((index, early))
        for view in reducer.vector_views:
            view.fill_(10 * index + self.comm.rank)
        return True

    def push(self, index: int) -> None:
        if self.queue.count(index):
            self.queue.start_complete()

    def push_all_slices(self, *indices: int) -> None:
        for index in indices:
            for _ in range(PARAMETERS):
                self.push(index)

    def collect(self) -> tuple[list[float], Exception | None]:
        """Return the mean of each bucket that is taken."""
        taken: list[float] = []
        self.queue.start_rest(False, lambda reducer: None)
        untaken, failure = self.queue.collect(lambda one: taken.append(float(one.mean_views[0][0])), lambda: True)
        assert not untaken
        return taken, failure


def on_two_ranks(work: Callable[[Owner], Any]) -> list[Any]:
    return run_local(2, lambda comm: work(Owner(comm)))


def test_buckets_start_in_one_order_though_they_are_complete_in_others() -> None:
    def work(owner: Owner) -> None:
        owner.push_all_slices(1)
        assert owner.queue.n_started == 0
        owner.push(0)
        assert owner.queue.n_started == 0  # one slice of two
        owner.push(0)
        assert owner.queue.n_started == 2
        owner.push_all_slices(2)
        assert owner.queue.n_started == 2  # the last one waits for `start_rest`
        assert owner.collect() == ([0.5, 10.5, 20.5], None)
        assert owner.filled == [(0, True), (1, True), (2, False)]
        assert owner.queue.n_started == 0

    on_two_ranks(work)


def test_ranks_push_in_different_orders() -> None:
    def work(owner: Owner) -> None:
        for _ in range(3):
            owner.push_all_slices(*((0, 1) if owner.comm.rank else (1, 0)))
            assert owner.collect() == ([0.5, 10.5, 20.5], None)

    on_two_ranks(work)


def test_a_bucket_that_cannot_be_filled_is_sent_as_zeros() -> None:
    def work(owner: Owner) -> None:
        owner.fails_at = 1 if owner.comm.rank else -1
        owner.push_all_slices(0, 1)  # raises nothing, as it is called by backward
        assert isinstance(owner.queue.fill_error, ArithmeticError) == (owner.comm.rank == 1)
        assert owner.collect() == ([0.5, 5.0, 20.5], None)
        assert owner.queue.fill_error is None

    on_two_ranks(work)


def test_buckets_without_an_order_start_when_they_are_complete() -> None:
    def work(owner: Owner) -> None:
        queue = BucketQueue(owner.reducers, owner.comm, in_background=False)
        errors: list[Exception | None] = []
        for started, index in enumerate((2, 0, 1)):
            owner.fill(owner.reducers[index], early=True)
            queue.push(index, 1, errors.append)
            assert queue.n_started == started
            queue.push(index, PARAMETERS - 1, errors.append)
            assert queue.n_started == started + 1
        queue.wait()
        assert errors == [None] * BUCKETS
        assert queue.take_failure() is None
        assert queue.n_started == 0
        assert [float(one.mean[0]) for one in owner.reducers] == [0.5, 10.5, 20.5]

    on_two_ranks(work)
