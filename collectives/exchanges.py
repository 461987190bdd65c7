"""Collectives of a communicator that move arrays and objects, and compute nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

from collectives.compiling import keep_uncompiled
from collectives.consistency.call_check import fingerprint
from collectives.dense.broadcast_gather import all_gather_rows, broadcast_array, broadcast_chain, is_long
from collectives.execution.handle import Call, Steps
from collectives.execution.staged import staged
from collectives.memory import COPIED
from collectives.objects import all_gather_object, broadcast_object
from collectives.operands import require_root, rows_operand, writable_operand
from collectives.point_to_point import PointToPoint
from collectives.routes import Routes


class Exchanges(PointToPoint):
    """What a communicator has to move arrays and objects among all its ranks."""

    _routes: Routes  # made by `Communicator`, once the ranks know the network

    @keep_uncompiled
    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite `x`, of equal shape and dtype everywhere, with rank `root`'s; returns `x`.

        Any dtype of `allreduce`, and bool and the other integers of 8 and 16 bits.
        """
        name = f"broadcast(root={root})"
        vector = writable_operand(self, x, name, COPIED)
        text = f"{name} of {vector.dtype}{list(vector.shape)}"
        require_root(self, root, text)
        nbytes = vector.values.nbytes
        call = Call(self, lambda: text)
        call.is_compared = is_long(vector)

        def check(ready: Any) -> Steps:
            return self.check(call, fingerprint(text), None, ready, ready)

        with self._span("broadcast", root=root, bytes=nbytes):
            program = partial(self._routes.program, broadcast_chain(nbytes, root), nbytes, 64, nbytes)
            self.run(call, broadcast_array(call, vector, root, check, program))
        return x

    @keep_uncompiled
    def allgather(self, x: Any) -> Any:
        """The rows of all ranks in one new array, rank 0's first; as on every rank.

        Parameters
        ----------
        x : array[n, ...]
            Of a dtype of `broadcast`, contiguous. `n` may differ from rank to rank and may be 0; dtype and shape of a
            row are equal on all ranks.

        Returns
        -------
        like x, array[sum of the ranks' n, ...]

        Raises
        ------
        CollectiveMismatch
            The ranks differ in dtype or shape of a row.
        TypeError, ValueError
            This rank's array cannot be gathered; the others then raise CollectiveMismatch.
        CollectiveTimeout, PeerFailure
        """
        rows = rows_operand(self, x, "allgather", COPIED)
        text = f"allgather of rows of {rows.dtype}{list(rows.shape[1:])}"
        call = Call(self, lambda: text)
        with self._span("allgather", bytes=rows.values.nbytes):
            steps = all_gather_rows(call, self.check(call, fingerprint(text)), x, rows)
            return self.run(call, staged(call, steps, rows.staging, None))

    @keep_uncompiled
    def barrier(self) -> None:
        """Wait until every rank is here."""
        call = Call(self, lambda: "barrier()")
        with self._span("barrier"):
            self.run(call, self._barrier(call, self.check(call, fingerprint("barrier"))))

    def _barrier(self, call: Call, check: Steps) -> Steps:
        yield from check
        if self.size > 1:
            yield from self.turn_of(call)
            missing = f"{self.here}: not all ranks reach the barrier"
            yield from self.await_request(call, self.mpi_comm.Ibarrier(), lambda: missing)

    @keep_uncompiled
    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Rank `root`'s object on every rank: itself there, and copies elsewhere, where `obj` does not matter.

        The object is pickled. Unpickling runs code that `root` chose: trust the program of every rank.

        Raises
        ------
        TypeError
            This rank cannot pickle or unpickle it; the others then raise CollectiveMismatch.
        ValueError
            There is no rank `root`.
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        """
        require_root(self, root, f"broadcast_object(root={root})")
        with self._span("broadcast_object", root=root):
            return broadcast_object(self, obj, root)

    @keep_uncompiled
    def allgather_object(self, obj: Any) -> list[Any]:
        """Copies of every rank's object, in rank order, on every rank; pickled, and raises, as `broadcast_object`."""
        with self._span("allgather_object"):
            return all_gather_object(self, obj)
