"""How a communicator ends where nothing has failed on this rank before: by `close`, or with its block or program."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
from mpi4py import MPI

from collectives.consistency.call_check import fingerprint
from collectives.execution.handle import Call, Steps
from collectives.group import Group
from collectives.progress.polling import forget_mismatch, keep_alive, until
from collectives.trace.recorder import compare_clocks


class Closable(Group):
    """A group that ends when it is no longer needed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            if not self._broken:
                self._broken = "it was left by an exception"
                self.missing.leave(error)
            forget_mismatch()
            keep_alive(self)
            if self.workers is not None:
                self.workers.dismiss()
            if self.trace is not None:
                self.trace.save()

    def __del__(self) -> None:
        # a call under way that nobody waits for any more: MPI goes on writing to its buffers
        if getattr(self, "_in_flight", None):
            keep_alive(self)

    def close(self) -> None:
        """Free the MPI communicator (collective). After an error it is left to MPI's own clean-up instead.

        Raises
        ------
        CollectiveMismatch
            Other ranks make another call. The communicator stays open.
        RuntimeError
            A call was let go without waiting for it.
        OSError
            The trace cannot be written.
        """
        if self._broken:
            return
        if self._driver is not None:
            self._driver.flush()
        for call in tuple(self._in_flight):
            call.wait()
        if self.size > 1:
            closing = Call(self, lambda: "close()")
            closing.wait_name = None  # traces are of what the caller calls
            self.run(closing, self._closing(closing))
        if self._apart:
            self._where_driven(self._leave_apart)
            return
        if self.trace is not None:
            self.trace.readings.append(compare_clocks(self.mpi_comm, self.trace.clock, self.timeout))
        self._broken = "it was closed"
        self._free()
        if self.trace is not None:
            self.trace.write()
        dropped = self._dropped
        if dropped is not None and not dropped.seen:
            raise RuntimeError(f"{self.here}: {dropped.name()} was begun and never waited for: keep what begin returns")

    def _closing(self, call: Call) -> Steps:
        """Agree on closing, and take what the ranks have told each other beside their calls: MPI would keep it."""
        call.arrival = 0
        if self._verify:
            yield from self._check.steps(call, fingerprint("close()"))
        sent, received = self.missing.stop_sending()
        to_receive, ones = np.zeros(self.size, np.int64), np.ones(self.size, np.int32)
        request = self.mpi_comm.Ialltoallv([sent, ones, MPI.INT64_T], [to_receive, ones, MPI.INT64_T])
        call.describe, call.owners = lambda: f"{self.here}: not all ranks close the communicator", (request, to_receive)
        yield from until(request, call)
        while (received < to_receive).any():
            self.missing.receive_messages()
            yield False

    def _leave_apart(self) -> None:
        """Close with calls in flight that other ranks need not know of: their requests stay with MPI."""
        self._broken = "it was closed"
        self.failure = self._closed()
        keep_alive(self)
        if self.workers is not None:
            self.workers.dismiss()
        for call in tuple(self._apart):
            call.end_by(self.failure)

    def _free(self) -> None:
        """Give back what MPI has lent, and end the workers."""
        if self.workers is not None:
            self.workers.close()
        self._free_held()
        self._check.free()
        self.mpi_comm.Free()
