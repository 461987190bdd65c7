"""Handles of calls in the background, which their callers keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic

from collectives.annotations import Result
from collectives.arrays import DeviceStream, require_stream, wait
from collectives.errors import refuse_copies
from collectives.execution.call import Call
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import one_line


@refuse_copies(lambda one: one._call.group.here, "wait() for it, and take the result")
class Handle(Generic[Result]):
    """Handle of a call in the background. Keep it until `wait` returns.

    Ranks may poll their handles and wait for them in different orders, since `poll` and `wait` advance all calls of the
    thread. A call makes progress in these two alone, so that a rank that computes for long keeps the others waiting.
    Calls of a communicator with a progress thread advance by themselves.

    Parameters
    ----------
    call : Call
        The call, which the communicator or an aggregator has begun.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def overlap(comm):
    ...     handle = comm.iallreduce(np.full(3, comm.rank, np.float32))
    ...     while not handle.poll():
    ...         pass  # compute a little
    ...     return handle.wait()
    >>> mpicomp.run_local(2, overlap)[0]
    array([1., 1., 1.], dtype=float32)
    """

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __repr__(self) -> str:
        call = self._call
        state = "done" if call.done else "pending"
        if call.error is not None:
            state = f"failed, {type(call.error).__name__}: {one_line(call.error)}"
        return f"<Handle of {call.brief()}, {call.group.here}: {state}>"

    @keep_uncompiled
    def poll(self) -> bool:
        """Advance all calls of the thread without waiting.

        Returns
        -------
        bool
            True once the result is there.

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure, CommunicatorClosed
        NonFiniteGradient
            Of an aggregator's call; on every rank.
        """
        call = self._call
        if call.completion is None:
            call.advance_all()
        elif call.completion.lost:
            raise call.group.calls.failure_of_another()
        if call.done:
            call.mark_seen()
        if call.error is not None:
            call.mark_raised()
            raise call.error
        return call.done

    test = poll

    @keep_uncompiled
    def wait(self, stream: DeviceStream | None = None) -> Result:
        """Wait for the end of the call.

        Parameters
        ----------
        stream : torch.cuda.Stream, optional
            Stream that uses a result on a GPU. The host then waits for the messages only: the call ends once the last
            kernel or copy is queued, and `stream` waits for it. Use the result on this stream, or on one that waits for
            it, and free the arrays of the call there. None: the host waits until the result is there for all streams.

        Returns
        -------
        object
            The result of the call, such as an array.

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure, CommunicatorClosed, NonFiniteGradient
            As of `poll`; with a `stream` too, since the ranks exchange their reports before the call ends.
        RuntimeError
            The call would wait for itself, such as in a callback of the progress thread.
        TypeError, ValueError
            `stream` is no stream of PyTorch, or captures a CUDA graph; the call goes on.

        Notes
        -----
        A result in the host's memory is there when this returns, with a `stream` or without.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> def total(comm, x):
        ...     handle = comm.iallreduce(x)
        ...     return 2 * handle.wait(stream=torch.cuda.current_stream() if x.is_cuda else None)
        >>> with mpicomp.Communicator() as comm:
        ...     total(comm, torch.ones(2))
        tensor([2., 2.])
        """
        call = self._call
        if stream is not None:
            call.stream = require_stream(stream)  # from now on the call may end while a device works
        try:
            observer = call.group.observer
            if observer is not None and not call.done and call.wait_name is not None:
                kind = "wait" if call.completion is None else "exposed"
                with observer.span(kind, f"wait for {call.name()}"):
                    result: Result = call.wait()
            else:
                result = call.wait()
            if call.queued is not None:
                wait(call.queued) if stream is None else call.queued.block(stream)
            return result
        finally:
            if call.done:
                call.mark_seen()

    def then(self, callback: Callable[[Handle[Result]], None], stream: DeviceStream | None = None) -> None:
        """Register a callback, which the progress thread calls with this handle once the call has ended.

        The callback may begin calls, and must not wait for one. The handle's `wait` returns or raises at once. An
        exception of the callback is uncaught: it is printed, and ends the job (`install_abort_hook`).

        Parameters
        ----------
        callback : callable
            Called as ``callback(handle)`` on the progress thread, also if the call has ended already or failed.
        stream : torch.cuda.Stream, optional
            As in `wait`: the callback calls ``handle.wait(stream)``, and uses a result on a GPU on this stream.

        Raises
        ------
        RuntimeError
            The communicator has no progress thread.
        TypeError, ValueError
            As of `wait`.

        Examples
        --------
        >>> import threading
        >>> import mpicomp
        >>> import numpy as np
        >>> comm, ended = mpicomp.Communicator(), threading.Event()
        >>> comm.start_progress_thread()
        True
        >>> handle = comm.iallreduce(np.ones(3))
        >>> handle.then(lambda handle: ended.set())
        >>> ended.wait(timeout=10)
        True
        >>> handle.wait()
        array([1., 1., 1.])
        >>> comm.close()
        """
        completion = self._call.completion
        if completion is None:
            raise RuntimeError(f"{self._call.group.here}: only calls that a progress thread drives take callbacks")
        if stream is not None:
            self._call.stream = require_stream(stream)
        completion.then(partial(callback, self))

    def detach(self) -> None:
        """Allow dropping this handle without `wait`; the call then ends during a later one, or in ``close()``.

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> with mpicomp.Communicator() as comm:
        ...     comm.iallreduce(np.ones(3)).detach()
        """
        self._call.detached = True

    def __del__(self) -> None:
        call = self._call
        if not (call.seen or call.detached):
            call.dropped = True
            call.group.calls.dropped = call
