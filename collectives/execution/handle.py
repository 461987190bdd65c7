"""A collective that goes on while its caller does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.errors import CollectiveMismatch
from collectives.execution.pipelined import PipelinedExecution
from collectives.progress.polling import Backoff


class Handle:
    """A collective under way. Keep it until `wait` returns; it keeps its buffers alive.

    Group may test their handles and wait for them in different orders: whichever one is asked, all of its
    communicator's move on. Between these calls none does, so a rank that stays away keeps the others waiting.

    Parameters
    ----------
    agreed : callable
        Whether all ranks are known to make this call; raises CollectiveMismatch.
    start : callable
        Starts it, once they are.
    progress : callable
        Advances everything in flight on the communicator.
    backoff : Backoff
        With the other ranks, until they agree.
    result : object
        What `wait` returns.
    """

    def __init__(
        self,
        agreed: Callable[[], bool],
        start: Callable[[], PipelinedExecution],
        progress: Callable[[], None],
        backoff: Backoff,
        result: Any,
    ) -> None:
        self._agreed, self._start, self._progress, self._patience = agreed, start, progress, backoff
        self._result = result
        self._execution: PipelinedExecution | None = None
        self._mismatch: CollectiveMismatch | None = None
        self._done = False

    def test(self) -> bool:
        """Make progress without waiting; True once the result is there.

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure, CommunicatorClosed
        """
        if not self._done and self._mismatch is None:
            self._progress()
        if self._mismatch is not None:
            raise self._mismatch
        return self._done

    def wait(self) -> Any:
        """The result, as `Communicator.allreduce` returns it; raises what `test` does."""
        while not self.test():
            pass
        return self._result

    def advance(self) -> bool:
        """Do one bit of work; True once there is nothing left to do, be it for a mismatch."""
        if self._execution is None:
            try:
                if not self._agreed():
                    self._patience.idle()
                    return False
            except CollectiveMismatch as mismatch:
                self._mismatch = mismatch  # for whoever asks for this result, not for who happens to advance it
                return True
            self._execution = self._start()
        execution = self._execution
        if execution.turn():
            execution.backoff.moved()
        elif not execution.done:
            execution.backoff.idle()
        self._done = execution.done
        return self._done
