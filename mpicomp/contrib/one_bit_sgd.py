"""1-bit SGD: each rank sends signs and two means per bucket, for values below and above 0; the error is fed back.

    p_m = g_m + e_m;   q_m = mean of its bucket's elements on the same side of 0;   e_m <- p_m - q_m
    result = mean_m q_m

Codes are gathered: a rank sends (M - 1)(1 + 64 / bucket) bits per element. The paper's buckets are columns of weight
matrices, which may be so short that the means cost more than the signs.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.annotations import override
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import adopt
from mpicomp.codecs.scaled_sign import TwoMeans
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.families import GatheringMethod


@method("one-bit-sgd", Learned(Grade.PROMISING, "had dense's loss in the two convex problems that were tried"))
@dataclass(frozen=True)
class OneBitSGD(GatheringMethod):
    """Options of 1-bit SGD: signs and two means per bucket from each rank, and a residual of their error.

    Parameters
    ----------
    bucket : int
        Number of elements that share two means.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Seide, Fu, Droppo, Li, Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed
    training of speech DNNs", Interspeech 2014.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     one_bit = mpicomp.OneBitSGD().start(comm, 4)
    ...     return one_bit.aggregate(np.array([1.0, 3.0, -2.0, -4.0], np.float32)), one_bit.residual
    >>> mpicomp.run_local(2, step)[0]
    (array([ 2.,  2., -3., -3.], dtype=float32), array([-1.,  1.,  1., -1.], dtype=float32))
    """

    bucket: int = 512

    def __post_init__(self) -> None:
        adopt(self, self.codec)

    @property
    def codec(self) -> TwoMeans:
        """Codec of the options."""
        return TwoMeans(self.bucket)

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> TwoMeans:
        return self.codec

    @property
    @override
    def error_rule(self) -> ErrorFeedback:
        return ErrorFeedback()
