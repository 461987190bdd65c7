"""MEM-SGD: compression with error feedback on the way to owners of parts of the vector, and their mean itself back.

    rank m:   v_m = g_m + d_m;       send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = mean_m Q(v_m);     send v
    result:   v

Owners are those of `mpicomp.DoubleSqueeze`, which compresses the mean as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import Parts, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.families import TwoPassMethod
from mpicomp.reducers.two_pass import two_pass


@method(
    "mem-sgd",
    Learned(Grade.COMPARED, "learns as double-squeeze, which sends less"),
    forms=({}, {"compressor": "top-k:rate=10"}),
)
@dataclass(frozen=True)
class MemSGD(TwoPassMethod):
    """Options of MEM-SGD: compression with error feedback to the owners, and the mean in full precision back.

    Parameters
    ----------
    compressor, seed
        As in `DoubleSqueeze`, for the first pass. The second pass carries the mean, for 16-bit vectors in 16 bits.

    Raises
    ------
    ValueError
        There is no such compressor, or an option is out of range.

    References
    ----------
    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018 (arXiv 1809.07599).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     memory = mpicomp.MemSGD("top-k:rate=4").start(comm, 4)
    ...     gradient = [4.0, 0.0, 0.0, 0.0] if comm.rank == 0 else [0.0, 0.0, -3.0, 0.5]
    ...     return memory.aggregate(np.array(gradient, np.float32))
    >>> mpicomp.run_local(2, step)[0]
    array([ 2. ,  0. , -1.5,  0. ], dtype=float32)
    """

    @override
    def codec_back(self, dtype: str) -> FullPrecision:
        return FullPrecision(dtype)

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Error feedback on the first pass x compressor x two passes, the second in full precision."""
        codec, second = self.codec_for(spec.dtype, ()), self.codec_back(spec.dtype)
        return two_pass(comm, spec, codec, second, ErrorFeedback(), None, self.seed)
