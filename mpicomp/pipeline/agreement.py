"""Agreements between ranks before, during and after a step: over a communicator, or between the two ends of a cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.annotations import AnyArray
from mpicomp.pipeline.store_rows import Ids

DIFFERENT = (
    "have kept different messages of the same examples: load the last checkpoint, or call forget_messages() on all "
    "ranks, and all are sent in full again"
)
UNKNOWN = -(2**63)
"""Stands for the checksum of messages that are lost. A sum has this value once in 2^64 times."""
_PAIR_TAG = 20  # above those of cuts


class PipelineError(RuntimeError):
    """A step of a pipeline failed on some stage. Every stage raises it; the state before the step is kept.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.pipeline import PipelineError, PipelineStage
    >>> def step_without_targets(comm):
    ...     stage = PipelineStage(torch.nn.Linear(3, 3), comm, 2, loss=torch.nn.functional.mse_loss)
    ...     try:
    ...         stage.step(torch.ones(4, 3))
    ...     except PipelineError:
    ...         return stage.steps
    >>> mpicomp.run_local(2, step_without_targets)
    [0, 0]
    """


class MessagesDiffer(PipelineError):
    """The ends of some `cuts` have kept different messages."""

    def __init__(self, text: str, cuts: Sequence[int] = ()) -> None:  # pickle makes it of the text alone
        super().__init__(text)
        self.cuts = cuts


# All ranks of a communicator ------------------------------------------------------------------------------------------


def agree_on_options(comm: Communicator, fault: str | None, options: str, action: str, name: str) -> list[int]:
    """Return each rank's number in the job; PipelineError on all if one has a fault or options differ. Collective."""
    # errors begin with the `action`, such as "the pipeline cannot be made", and call a rank by the `name` "stage" or
    # "rank"
    answers = comm.allgather_object((fault, options, _job_rank(comm)))
    raise_faults((text for text, _, _ in answers), action, name=name)
    if len({text for _, text, _ in answers}) > 1:
        listed = "; ".join(f"{name} {rank}: {text}" for rank, (_, text, _) in enumerate(answers))
        raise PipelineError(f"{comm.here}: the {name}s are given different options, give all the same: {listed}")
    return [number for _, _, number in answers]


def agree_on_batch(
    comm: Communicator, examples: int, ids: Ids | None, fault: str | None, checksums: tuple[int, int]
) -> Ids:
    """Return the ids of all stages' examples, or numbers in place of them; PipelineError on all stages. Collective."""
    # `examples` is -1 on a stage that was given no part of the batch; the `checksums` are of the cuts before and behind
    digest = b"" if ids is None else hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
    mark = int.from_bytes(digest, "little", signed=True)
    everyones = comm.allgather(np.array([[fault is not None, examples, mark, *checksums]], np.int64))
    cuts = np.flatnonzero(checksums_differ(everyones[:-1, 4], everyones[1:, 3])).tolist()
    if cuts:  # before other errors: a checksum is compared only once
        raise MessagesDiffer(f"{comm.here}: stages {cuts[0]} and {cuts[0] + 1} {DIFFERENT}", cuts)
    if everyones[:, 0].any():
        raise_faults(comm.allgather_object(fault), "the step was not begun")
    sizes = {int(size) for size in everyones[:, 1] if size >= 0}
    if len(sizes) != 1 or len(set(everyones[:, 2].tolist())) != 1:
        listed = ", ".join(
            f"stage {stage}: {'any number' if size < 0 else size} of examples, ids {one & 0xFFFFFFFF:08x}"
            for stage, (_, size, one, *_) in enumerate(everyones.tolist())
        )
        raise PipelineError(
            f"{comm.here}: the stages are given different batches: {listed}; give all of them the same examples "
            "in the same order"
        )
    return np.arange(sizes.pop()) if ids is None else ids


def checksums_differ(mine: AnyArray, theirs: AnyArray) -> NDArray[np.bool_]:
    """Return which of the checksums of both ends are known and differ."""
    differ: NDArray[np.bool_] = (mine != theirs) & (mine != UNKNOWN) & (theirs != UNKNOWN)
    return differ


def agree_on_end(comm: Communicator, loss: float, failure: Exception | None) -> float:
    """Return the last stage's loss; PipelineError on every stage if one has failed; collective."""
    everyones = comm.allgather(np.array([[loss, failure is not None]], np.float64))
    if everyones[:, 1].any():
        raise_faults(comm.allgather_object(failure_text(failure)), "the step failed", failure)
    return float(everyones[-1, 0])


@contextmanager
def share_with_replicas(everyone: Communicator | None) -> Iterator[None]:
    """Raise a PipelineError of the block in all pipelines of `everyone`; collective over all their ranks."""
    error: PipelineError | None = None
    try:
        yield
    except PipelineError as caught:
        error = caught
    # a block raises it on all stages of a pipeline or on none
    if everyone is not None and everyone.allgather(np.array([[error is not None]], np.int64)).any():
        texts = everyone.allgather_object(None if error is None else str(error))
        if error is None:
            rank, first = next((rank, text) for rank, text in enumerate(texts) if text is not None)
            raise PipelineError(f"{everyone.here}: the pipeline of rank {rank} failed, and so this one does: {first}")
    if error is not None:
        raise error


def failure_text(failure: BaseException | None) -> str | None:
    """Return the text that other ranks receive about a failure."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def raise_faults(
    faults: Iterable[str | None], action: str, cause: BaseException | None = None, name: str = "stage"
) -> None:
    """Raise PipelineError if a stage, or rank, has a fault."""
    found = [f"{name} {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
    if found:
        raise PipelineError(f"{action}: {'; '.join(found)}") from cause


def _job_rank(comm: Communicator) -> int:
    """Return the number of this rank in the job, or of its thread where ranks are threads of one process."""
    return int(getattr(comm.mpi_comm, "thread", MPI.COMM_WORLD.Get_rank()))


# Two ranks ------------------------------------------------------------------------------------------------------------


def exchange(comm: Communicator, other: int, tag: int, mine: AnyArray, theirs: AnyArray) -> AnyArray:
    """Send an array to another rank, and receive that rank's array in `theirs`, which is returned."""
    receiving, sending = comm.irecv(theirs, other, tag), comm.isend(mine, other, tag)
    receiving.wait()
    sending.wait()
    return theirs


class Pair:
    """Exchange of faults and a few numbers with one other rank around a step, while the remaining ranks wait."""

    def __init__(self, comm: Communicator, other: int, names: tuple[str, str]) -> None:
        # names of this rank and of the other one in errors
        self._comm, self._other, self._names = comm, other, names

    def send(self, numbers: Sequence[int] | Ids) -> None:
        """Send numbers that the other rank receives."""
        self._comm.send(np.asarray(numbers, np.int64), self._other, _PAIR_TAG)

    def receive(self, count: int) -> Ids:
        """Receive so many numbers."""
        found = np.empty(count, np.int64)
        self._comm.recv(found, self._other, _PAIR_TAG)
        return found

    def exchange(self, numbers: Sequence[int]) -> list[int]:
        """Send numbers, and return as many of the other rank's."""
        theirs = np.empty(len(numbers), np.int64)
        found: list[int] = exchange(self._comm, self._other, _PAIR_TAG, np.asarray(numbers, np.int64), theirs).tolist()
        return found

    def agree(self, action: str, fault: str | None, cause: BaseException | None = None) -> None:
        """Exchange the faults of both ends; both raise PipelineError in the same words if one has a fault."""
        text = np.frombuffer((fault or "").encode(), np.uint8)
        (size,) = self.exchange([text.size])
        if text.size or size:
            other = read_fault(exchange(self._comm, self._other, _PAIR_TAG, text, np.empty(size, np.uint8)).tobytes())
            faults = sorted(zip(self._names, (fault, other), strict=True))
            raise PipelineError(f"{action}: {'; '.join(f'{name}: {one}' for name, one in faults if one)}") from cause


def read_fault(message: bytes) -> str:
    """Return the fault that the other rank of a pair has sent; damaged bytes have replacement characters."""
    return message.decode(errors="replace")
