"""DoubleSqueeze and MEM-SGD: error feedback on both passes, or on the first alone.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send Q(v);     d <- v - Q(v)
    result:   Q(v)

The owner is a parameter server (topology "star") or, elsewhere, each rank for its part of the vector. MEM-SGD sends the
mean itself on the second pass. Q may be biased, but must be a contraction (mpicomp help error-feedback): the error of
a step is added to the next step's input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collectives import Communicator
from collectives.annotations import override
from collectives.schedules.star import Direct
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, Parts, VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.base import Codec
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.codecs.options import choice, integer
from mpicomp.codecs.registry import compressor
from mpicomp.codecs.scaled_sign import OneBit
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.piece_lengths import piece_elements
from mpicomp.reducers.two_pass import two_pass

_DEFAULT = OneBit(1 << 15)


@dataclass(frozen=True)
class _TwoPassMethod(Algorithm):
    """Options and messages that both methods have in common."""

    compressor: Codec | str = _DEFAULT
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "compressor", compressor(self.compressor))
        integer(self, "seed")

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return compressor(self.compressor).encodes_on_devices

    def _second(self, dtype: str) -> Codec:
        """Return the codec of the second pass."""
        return compressor(self.compressor)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        codec, second = compressor(self.compressor), self._second(dtype)
        return MessageModel(
            lambda elements, weight: second.nbytes(elements) if weight == ranks else codec.nbytes(elements),
            piece_elements(codec, n, piece_bytes, second),
            codec.alignment,
            Direct(),
        )


@method(
    "double-squeeze",
    Learned(Grade.PROMISING, "had dense's loss in the one training that was tried"),
    forms=({}, {"compressor": "random-sparsification:p=0.3"}),
)
@dataclass(frozen=True)
class DoubleSqueeze(_TwoPassMethod):
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

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Error feedback on both passes x compressor x two passes."""
        codec = compressor(self.compressor)
        first = ErrorFeedback(0.0 if self.leaves_residual else 1.0)  # errors are kept, but added by the caller
        return two_pass(comm, spec, codec, codec, first, ErrorFeedback(), self.seed)


@method(
    "mem-sgd",
    Learned(Grade.COMPARED, "learns as double-squeeze, which sends less"),
    forms=({}, {"compressor": "top-k:rate=10"}),
)
@dataclass(frozen=True)
class MemSGD(_TwoPassMethod):
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

    def _second(self, dtype: str) -> Codec:
        return FullPrecision(dtype)

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Error feedback on the first pass x compressor x two passes, the second in full precision."""
        codec, second = compressor(self.compressor), self._second(spec.dtype)
        return two_pass(comm, spec, codec, second, ErrorFeedback(), None, self.seed)
