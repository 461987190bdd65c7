"""DoubleSqueeze: compression with error feedback on both passes.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send Q(v);     d <- v - Q(v)
    result:   Q(v)

The owner is a parameter server (topology "star") or, elsewhere, each rank for its part of the vector. Q may be
biased, but must be a contraction (mpicomp help error-feedback): the error of a step is added to the next step's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Parts, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.base import Codec
from mpicomp.codecs.options import choice
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.families import TwoPassMethod
from mpicomp.reducers.two_pass import two_pass


@method(
    "double-squeeze",
    Learned(Grade.PROMISING, "had dense's loss in the one training that was tried"),
    forms=({}, {"compressor": "random-sparsification:p=0.3"}),
)
@dataclass(frozen=True)
class DoubleSqueeze(TwoPassMethod):
    """Options of DoubleSqueeze: compression with error feedback on the way to the owners and on the way back.

    Parameters
    ----------
    compressor : Codec or str
        Codec of both passes: one of `mpicomp.codecs`, or its name and options as in ``"one-bit:bucket=512"``. Buckets
        are counted from the start of the vector, so the result does not depend on which rank owns an element.
    seed : int
        Equal on all ranks.
    residual : "own" or "copy"
        Place of the errors of the first pass, as in `Relay`: a vector of its own, or the rank's copy of the model,
        which requires ``synchronize="updates"``.

    Raises
    ------
    ValueError
        There is no such compressor, or an option is out of range.

    References
    ----------
    Tang, Yu, Lian, Zhang, Liu, "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
    compression", ICML 2019 (arXiv 1905.05957).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     squeeze = mpicomp.DoubleSqueeze("top-k:rate=2").start(comm, 4)
    ...     mean = squeeze.aggregate(np.array([4.0, 0.1, -3.0, 0.2], np.float32))
    ...     return mean, squeeze.residual
    >>> mean, residual = mpicomp.run_local(2, step)[0]
    >>> mean, residual
    (array([ 4.,  0., -3.,  0.], dtype=float32), array([0. , 0.1, 0. , 0.2], dtype=float32))
    """

    residual: Literal["own", "copy"] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self, "residual", ("own", "copy"))

    @property
    @override
    def leaves_residual(self) -> bool:
        return self.residual == "copy"

    @override
    def codec_back(self, dtype: str) -> Codec:
        return self.codec_for(dtype, ())

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Error feedback on both passes x compressor x two passes."""
        codec = self.codec_for(spec.dtype, ())
        first = ErrorFeedback(0.0 if self.leaves_residual else 1.0)  # errors are kept, but added by the caller
        return two_pass(comm, spec, codec, codec, first, ErrorFeedback(), self.seed)
