"""1-bit SGD: each rank sends its signs and, per bucket, what they stand for on average; the error is fed back.

    p_m = g_m + e_m;   q_m = mean of its bucket's elements on the same side of 0;   e_m <- p_m - q_m
    result = mean_m q_m

Codes are gathered: a rank sends (M - 1)(1 + 64 / bucket) bits an element. With the paper's buckets, columns of weight
matrices that may be very short, the means cost more than the signs.

Reference: Seide, Fu, Droppo, Li, Yu, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from mpicomp.algorithms.base import Synchronize, Wire
from mpicomp.algorithms.coded import coded_wire
from mpicomp.algorithms.feedback import ErrorFeedback
from mpicomp.algorithms.gathered import GatheredAggregator
from mpicomp.codecs.one_bit import TwoMeans


@dataclass(frozen=True)
class OneBitSGD:
    """Options of 1-bit SGD.

    Parameters
    ----------
    bucket : int
        Elements that share two means.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int = 512

    synchronize: ClassVar[Synchronize] = "gradients"

    def __post_init__(self) -> None:
        _ = self.codec

    @property
    def codec(self) -> TwoMeans:
        """Of the options."""
        return TwoMeans(self.bucket)

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        segments: Sequence[int] | None = None,
    ) -> GatheredAggregator:
        """See `Algorithm.start`; segments play no part."""
        return GatheredAggregator(self, comm, n, dtype, vector_id, self.codec, ErrorFeedback())

    def wire(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> Wire:
        """See `Algorithm.wire`."""
        return coded_wire(self.codec, n, piece_bytes)
