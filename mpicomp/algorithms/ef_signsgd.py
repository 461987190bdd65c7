"""EF-signSGD under all-reduce: signs counted, one scale for all ranks, and a residual that keeps what they miss.

Per step and bucket of D elements, with g this rank's gradient and e its residual:

    p = g + e,   s = mean over ranks of ||p||_1 / D,   result = s * mean over ranks of sgn(p),   e = p - s sgn(p)

The ranks' norms travel beside the signs, not before them: s is needed only to make values of the counts. What is kept
is p; s sgn(p) is subtracted while the next step is encoded.

Departure from the paper: its workers have a scale each, which counts cannot carry. With one scale for all, this is the
scaled sign of the ranks' vectors put end to end, so the sum over ranks of ||e||^2 is that of ||p||^2 less M D s^2:
compression is still a contraction, which is what error feedback asks for.

Reference: S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error feedback fixes signSGD and other gradient
compression schemes", ICML (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator
from collectives.arrays import named
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.codecs.options import integer
from mpicomp.codecs.vote_counts import Counts
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.shared_scale import SharedScale
from mpicomp.reducers.vote_count import VoteCount, counts_model
from mpicomp.step import StepDriver


@dataclass(frozen=True)
class EFSignSGD(Algorithm):
    """Options of EF-signSGD.

    Parameters
    ----------
    bucket : int or None
        Elements that share a scale, at least 1, counted from the start of each tensor; the last may be fewer. None:
        the whole tensor, or vector.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int | None = None

    def __post_init__(self) -> None:
        integer(self, "bucket", 1, also=(None,))

    @property
    def uses_tensor_lengths(self) -> bool:
        """Each tensor has scales of its own."""
        return True

    def encodes_on_devices(self, dtype: str) -> bool:
        """See `Algorithm`."""
        return True

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Signs of the vector and the residual are counted; scales travel beside."""
        reducer = VoteCount(self, comm, spec)
        groups = ScaleGroups.of(spec.tensor_lengths, spec.n, self.bucket)
        pieces, counts = reducer.program.pieces, reducer.payload.counts
        feedback = SharedScale(named(spec.device), groups, pieces, counts, spec.dtype, comm.size)
        return Parts(feedback, Counts(), StepDriver(comm, feedback, reducer))

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`; the scales, which go once to every rank, are spread over both phases."""
        counts, bucket = Counts(), self.bucket

        def nbytes(elements: int, weight: int) -> int:
            scales = 0 if bucket is None else 4 * ranks * -(-elements // bucket)
            return counts.nbytes(elements, weight) + scales

        return counts_model(n, ranks, piece_bytes, nbytes)
