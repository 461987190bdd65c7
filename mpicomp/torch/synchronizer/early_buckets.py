"""Buckets that start while backward runs, and the gradients that are sent with them."""

from __future__ import annotations

from collections.abc import Iterable

from collectives.execution.uncompiled import keep_uncompiled
from mpicomp.torch.buckets.bucket_queue import BucketQueue
from mpicomp.torch.buckets.bucket_reducers import BucketReducers
from mpicomp.torch.devices import call_after_backward
from mpicomp.torch.synchronizer.gradient_hooks import GradientCounts, SentGradients


class EarlyBuckets:
    """Starts each bucket of the `queue` once its gradients are complete, and watches these until the step.

    Attributes
    ----------
    queue : BucketQueue
        Queue of the `reducers`.
    sent : SentGradients
        Gradients of this step that are sent, or wait for the step in a bucket that is sent last.
    notes, starts : bool
        Gradients of this step are noted, and complete buckets start.
    notes_rest : bool
        Autograd notes the gradients of incomplete buckets at the end of this backward.
    """

    def __init__(self, queue: BucketQueue, reducers: BucketReducers, counts: GradientCounts) -> None:
        self.queue, self.sent = queue, SentGradients()
        self.notes = self.starts = self.notes_rest = False
        self._reducers, self._counts = reducers, counts

    def start(self, index: int) -> None:
        """Note the gradients of a bucket that is complete now, and start the buckets that are due."""
        reducers, queue, sent = self._reducers, self.queue, self.sent
        sent.note(reducers[index].bucket.members, only_new=True)
        before = queue.n_started
        queue.start_complete()
        for reducer in reducers[before : queue.n_started]:
            sent.add(reducer.bucket.members, reducer.mean)

    def note_rest_later(self) -> None:
        """Have autograd note the gradients of incomplete buckets at the end of this backward."""
        self.notes_rest = call_after_backward(self._note_rest)

    @keep_uncompiled
    def _note_rest(self) -> None:
        """Note the gradients of incomplete buckets at the end of a backward: the others are noted together."""
        self.notes_rest = False
        with self._counts.lock:
            incomplete = {*self.queue.incomplete}
            pairs: Iterable[tuple[int, int]] = self._reducers.bucket_of.items() if incomplete else ()
            members, is_complete = self._reducers.members, self._counts.is_complete
            rest = [members[at] for at, bucket in pairs if bucket in incomplete and is_complete(at)]
            self.sent.note(rest, only_new=True)
