"""What the ranks of a pipeline agree on: that all can begin a step, that they mean the same batch, and how it ended."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from torch import Tensor

from collectives import Communicator
from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.rows import Ids
from mpicomp.pipeline.tensors import examples_of

DIFFERENT = (
    "have kept different messages of the same examples: load the last checkpoint, or call forget_messages() on all "
    "ranks, and all are sent in full again"
)


@dataclass(frozen=True)
class Batch:
    """What a rank was given of a batch.

    Attributes
    ----------
    examples : int
        -1: the rank was given none of it.
    ids : int64[examples] or None
    """

    examples: int = -1
    ids: Ids | None = None

    @classmethod
    def of(cls, inputs: Any, targets: Any, ids: Any, *, first: bool, last: bool) -> Batch:
        """Examine what a rank was given that has the first layers, or the last ones.

        Raises
        ------
        TypeError, ValueError
            Something is missing, or of the wrong kind or length.
        """
        sizes = {}
        if first:
            if not (isinstance(inputs, tuple | dict) or (isinstance(inputs, Tensor) and inputs.ndim)):
                raise TypeError("the first stage has no inputs: pass a tensor with an example in each row")
            sizes["inputs"] = examples_of(inputs)
        if last:
            if targets is None:
                raise TypeError("the last stage has no targets: pass a tensor with an example in each row")
            sizes["targets"] = examples_of(targets)
        listed = None
        if ids is not None:
            given = np.asarray(ids)
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise TypeError(f"ids are {given.dtype}{list(given.shape)}: pass an integer for each example")
            listed = given.astype(np.int64)
            sizes["ids"] = listed.size
        if len(set(sizes.values())) > 1:
            raise ValueError(f"there are {', '.join(f'{size} {name}' for name, size in sizes.items())}")
        if 0 in sizes.values():
            raise ValueError("the batch is empty: leave it out on every stage")
        return cls(next(iter(sizes.values()), -1), listed)

    def mark(self) -> int:
        """Stands for the ids; 0: there are none."""
        if self.ids is None:
            return 0
        return int.from_bytes(hashlib.blake2b(self.ids.tobytes(), digest_size=8).digest(), "little", signed=True)


class MessagesDiffer(PipelineError):
    """The ends of some cuts have kept different messages.

    Attributes
    ----------
    cuts : list of int
    """

    def __init__(self, cuts: list[int], text: str) -> None:
        super().__init__(text)
        self.cuts = cuts


def agree_on_batch(comm: Communicator, batch: Batch, wrong: str | None, kept: tuple[int, int]) -> Ids:
    """Return the ids of all stages' examples, or numbers in place of them; collective.

    Parameters
    ----------
    comm : Communicator
    batch : Batch
    wrong : str or None
        Why this stage cannot begin.
    kept : (int, int)
        Checksums of the messages kept for the cuts before and behind this stage.

    Raises
    ------
    PipelineError
        A stage cannot begin, or the stages differ; on all of them. MessagesDiffer: their checksums differ.
    """
    everyones = comm.allgather(np.array([[wrong is not None, batch.examples, batch.mark(), *kept]], np.int64))
    cuts = np.flatnonzero(everyones[:-1, 4] != everyones[1:, 3]).tolist()
    if cuts:  # before other errors: a checksum is compared only once
        raise MessagesDiffer(cuts, f"{comm.here}: stages {cuts[0]} and {cuts[0] + 1} {DIFFERENT}")
    if everyones[:, 0].any():
        raise_first(comm.allgather_object(wrong), "the step was not begun")
    sizes = {int(size) for size in everyones[:, 1] if size >= 0}
    if len(sizes) != 1 or len(set(everyones[:, 2].tolist())) != 1:
        told = ", ".join(
            f"stage {stage}: {'any number' if size < 0 else size} of examples, ids {one & 0xFFFFFFFF:08x}"
            for stage, (_, size, one, *_) in enumerate(everyones.tolist())
        )
        raise PipelineError(
            f"{comm.here}: the stages are given different batches: {told}; give all of them the same examples "
            "in the same order"
        )
    (examples,) = sizes
    return np.arange(examples) if batch.ids is None else batch.ids


def agree_on_end(comm: Communicator, loss: float, failure: Exception | None) -> float:
    """Return the last stage's loss; PipelineError on every stage if one has failed; collective."""
    everyones = comm.allgather(np.array([[loss, failure is not None]], np.float64))
    if everyones[:, 1].any():
        raise_first(comm.allgather_object(in_words(failure)), "the step failed", failure)
    return float(everyones[-1, 0])


@contextmanager
def shared_with_replicas(everyone: Communicator | None) -> Iterator[None]:
    """Raise a PipelineError of the block in all pipelines of `everyone`; collective over all their ranks.

    A block raises it on all stages of a pipeline or on none.
    """
    error: PipelineError | None = None
    try:
        yield
    except PipelineError as caught:
        error = caught
    if everyone is not None and everyone.allgather(np.array([[error is not None]], np.int64)).any():
        told = everyone.allgather_object(None if error is None else str(error))
        if error is None:
            rank, first = next((rank, text) for rank, text in enumerate(told) if text is not None)
            raise PipelineError(f"{everyone.here}: the pipeline of rank {rank} failed, and so this one does: {first}")
    if error is not None:
        raise error


def job_rank(comm: Communicator) -> int:
    """Number of this rank in the job, or of its thread where ranks are threads of one process."""
    return int(getattr(comm.mpi_comm, "thread", MPI.COMM_WORLD.Get_rank()))


def in_words(failure: BaseException | None) -> str | None:
    """What other ranks are told."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def raise_first(
    answers: Iterable[str | None], what: str, cause: BaseException | None = None, name: str = "stage"
) -> None:
    """Raise PipelineError with what is wrong on the stages, or ranks, if anything is."""
    told = [f"{name} {rank}: {wrong}" for rank, wrong in enumerate(answers) if wrong is not None]
    if told:
        raise PipelineError(f"{what}: {'; '.join(told)}") from cause
