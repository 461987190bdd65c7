"""Names of mpi4py's communicators that users look for in ours, and the code to write instead."""

from __future__ import annotations

from collectives.quoting import suggestion

_COUNTERPARTS = {
    "Get_rank": "comm.rank",
    "Get_size": "comm.size",
    "Barrier": "comm.barrier()",
    "Allreduce": "comm.allreduce(x, out=y)",
    "Allgather": "comm.allgather(x)",
    "Bcast": "comm.broadcast(x)",
    "bcast": "comm.broadcast_object(x)",
    "Send": "comm.send(x, rank)",
    "Recv": "comm.recv(x, rank)",
    "Isend": "comm.isend(x, rank)",
    "Irecv": "comm.irecv(x, rank)",
    "Split": "comm.split(color)",
    "Free": "comm.close()",
    "Abort": "raise an error, which ends the job",
}


def explain(name: str, names: tuple[str, ...]) -> str:
    """Return the text of the error for a name that a communicator lacks: the code to write."""
    text = f"a Communicator has no {name!r}"
    if name in _COUNTERPARTS:
        return f"{text}: write {_COUNTERPARTS[name]}"
    if name[:1].isupper():
        return f"{text}, which MPI's communicators may have: write comm.mpi_comm.{name}"
    return text + suggestion(name, names)
