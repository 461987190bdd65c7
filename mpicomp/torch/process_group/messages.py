"""Messages between two ranks. They take no part in the order of collectives, nor in the agreement on them."""

from __future__ import annotations

from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator
from collectives.execution.handle import Call, Steps
from collectives.progress.polling import until
from mpicomp.torch.process_group.packed import Bytes, Packed

LARGEST = 1 << 30  # MPI counts in an int: longer messages are of blocks


class Messages:
    """The messages of one process group.

    Parameters
    ----------
    mpi_comm : MPI.Comm
        For these messages alone.
    """

    def __init__(self, mpi_comm: MPI.Comm) -> None:
        self._comm = mpi_comm
        mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._largest_tag = int(mpi_comm.Get_attr(MPI.TAG_UB) or 0)

    def require(self, peer: int | None, tag: int) -> None:
        """Raise ValueError unless there is such a rank, and such a tag."""
        if peer is not None and not 0 <= peer < self._comm.size:
            raise ValueError(f"there is no rank {peer} in this group of {self._comm.size}")
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"the tag {tag} does not lie in 0 .. {self._largest_tag}, which MPI allows")

    def send(self, comm: Communicator, call: Call, packed: Packed, to: int, tag: int) -> Steps:
        """Send tensors, as a call of `comm`."""
        request = self._comm.Isend(_message(packed.bytes), to, tag)
        missing = f"{comm.here}: rank {to} does not receive what {call.name()} sends"
        yield from comm.await_request(call, request, lambda: missing)

    def receive(self, comm: Communicator, call: Call, packed: Packed, source: int | None, tag: int) -> Steps:
        """Overwrite tensors with those that a rank sends, or any rank; the call's result is the rank."""
        arrival = Arrival(self._comm.Irecv(_message(packed.bytes), MPI.ANY_SOURCE if source is None else source, tag))
        call.owners = (arrival,)
        missing = f"{comm.here}: nothing from {'any rank' if source is None else f'rank {source}'} for {call.name()}"
        call.describe = lambda: missing
        try:
            yield from until(arrival, call)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise CollectiveMismatch(
                f"{comm.here}: {call.name()} takes {packed.bytes.size} bytes, and the message is longer: send and "
                "receive tensors of one size"
            ) from error
        call.result = arrival.status.source
        came = arrival.status.Get_elements(MPI.BYTE)
        if came != packed.bytes.size:
            raise CollectiveMismatch(
                f"{comm.here}: {call.name()} takes {packed.bytes.size} bytes, and rank {call.result} sends {came}: "
                "send and receive tensors of one size"
            )


class Arrival:
    """A message that is awaited.

    Attributes
    ----------
    status : MPI.Status
        Who sent it, and how long it is.
    """

    def __init__(self, request: MPI.Request) -> None:
        self._request, self.status = request, MPI.Status()

    def Test(self) -> bool:  # noqa: N802 - as MPI calls it
        """Whether it has come."""
        return self._request.Test(self.status)


def _message(memory: Bytes) -> list[object]:
    if memory.size <= LARGEST:
        return [memory, memory.size, MPI.BYTE]
    starts = range(0, memory.size, LARGEST)
    kind = MPI.BYTE.Create_hindexed([min(LARGEST, memory.size - start) for start in starts], list(starts)).Commit()
    return [memory, 1, kind]
