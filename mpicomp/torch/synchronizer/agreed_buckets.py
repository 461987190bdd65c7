"""Buckets in flight together, one of which carries the ranks' agreement on the step."""

from __future__ import annotations

from collections.abc import Callable

from collectives.errors import NonFiniteGradient, explains_itself
from mpicomp.torch.buckets.bucket_queue import BucketQueue
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.synchronizer.step_agreement import StepAgreement, StepIntent


def start_agreed(queue: BucketQueue, agreement: StepAgreement, intent: StepIntent) -> None:
    """Start the buckets of a queue that have not started, the last of which carries the agreement."""

    def attach(reducer: BucketReducer) -> None:
        intent.refusal = intent.refusal or queue.fill_error
        agreement.attach(reducer.aggregator, intent)

    # where a bucket fails to start on this rank `attach` is not called, and the last step's sums must not count
    agreement.forget_sums()
    intent.refusal = intent.refusal or queue.fill_error
    queue.start_rest(intent.is_silent, attach)


def collect_agreed(
    queue: BucketQueue, agreement: StepAgreement, intent: StepIntent, take: Callable[[BucketReducer], None]
) -> bool:
    """Wait for the buckets of a queue, and hand their means to `take` as soon as all ranks make the step.

    Returns
    -------
    bool
        False: all ranks drop the step.

    Raises
    ------
    NonFiniteGradient
        Error of the first bucket with NaN or infinity, unless the step is dropped; the other buckets are taken.
    Exception
        This rank's refusal, another error of a bucket, or those of `StepAgreement.conclude`.
    """
    untaken, failure = queue.collect(take, lambda: agreement.is_settled)
    made = False
    try:
        if failure is None or isinstance(failure, NonFiniteGradient):
            made = agreement.conclude(intent)
    finally:
        for reducer in untaken:
            take(reducer) if made else reducer.undo()
    if failure is not None and not explains_itself(failure):
        agreement.comm.reject(failure, "averaging")  # whose bucket the others have started
    if failure is None or (intent.drops and isinstance(failure, NonFiniteGradient)):
        return made
    try:
        raise failure
    finally:
        failure = None  # its traceback has this frame, and they would keep each other and the optimizer
