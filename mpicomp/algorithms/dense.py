"""Dense: the exact mean, uncompressed, against which all methods are measured; or the mean in 16 bits.

    rank m:   send Q(g_m)
    owner:    send Q(mean_m Q(g_m))
    result:   the owner's Q(mean)

Q rounds each element to nearest. Owners sum in float32, in rank order; rounding errors are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from collectives import Communicator
from collectives.annotations import override
from collectives.arrays import named
from collectives.arrays.elements import NARROW
from collectives.execution.uncompiled import keep_uncompiled
from mpicomp.aggregator.algorithm import MessageModel, Parts, VectorSpec, on_instances
from mpicomp.aggregator.base import Aggregator
from mpicomp.aggregator.registration import method
from mpicomp.codecs.full_precision import Rounded
from mpicomp.codecs.options import choice
from mpicomp.feedback.base import NoFeedback
from mpicomp.reducers.families import CodingMethod
from mpicomp.reducers.full_precision_mean import FullPrecisionMean, summed_model
from mpicomp.reducers.two_pass import two_pass


@method("dense", forms=({}, {"wire": "float16"}, {"wire": "bfloat16"}), advised={})
@dataclass(frozen=True, repr=False)
class Dense(CodingMethod):
    """Mean over ranks in full precision (parallel SGD, "PSGD"), or rounded to 16 bits on the way.

    Parameters
    ----------
    wire : "float16" or "bfloat16", optional
        Every element is rounded to nearest in this type on the way to the rank that sums it, in float32, and its mean
        once more on the way back. On M ranks each sends 4 n (M - 1)/M bytes for n elements of any type, half as many
        as in float32. The result does not depend on the topology. A single rank rounds as well. Rounding errors are
        lost: in float16 gradients below 3e-8 become 0, those below 6e-5 lose bits, and one above 65504 raises
        NonFiniteGradient; so scale the loss, as torch.amp.GradScaler does. bfloat16 has the range of float32, and 8
        significant bits instead of 11. None: no rounding; vectors of 16 bits are summed, and sent, in float32.

    Raises
    ------
    ValueError
        `wire` has another value.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def average(comm, method):
    ...     vector = np.array([1.0, 2.0, 3.14159], np.float32) * comm.rank
    ...     return method.start(comm, 3).aggregate(vector)
    >>> mpicomp.run_local(2, lambda comm: average(comm, mpicomp.Dense()))[0]
    array([0.5     , 1.      , 1.570795], dtype=float32)
    >>> mpicomp.run_local(2, lambda comm: average(comm, mpicomp.Dense(wire="bfloat16")))[0]
    array([0.5      , 1.       , 1.5703125], dtype=float32)
    """

    wire: Literal["float16", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        choice(self, "wire", (None, *NARROW))

    def __repr__(self) -> str:
        return "Dense()" if self.wire is None else f"Dense(wire={self.wire!r})"

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Rounded:
        assert self.wire is not None, "nothing is encoded"
        return Rounded(self.wire)

    @override
    def codec_back(self, dtype: str) -> Rounded:
        return self.codec_for(dtype, ())

    @override
    def encodes_on_devices(self, dtype: str) -> bool:
        return self.wire is not None

    @on_instances
    @keep_uncompiled
    def start(self, comm: Communicator, n: int, *, device: Any = "cpu", **about: Any) -> Aggregator:
        """Create the aggregator for vectors of one length; parameters, errors and `about` as in `Algorithm.start`.

        Without `wire` nothing is encoded. Any existing device is accepted, so that callers need not treat this method
        differently: vectors may be on it or elsewhere, and are summed as by `Communicator.allreduce`.
        """
        if self.wire is not None:
            return super().start(comm, n, device=device, **about)
        aggregator = super().start(comm, n, **about)
        if str(device) != "cpu":
            with comm.refusing("start", ValueError):
                named(str(device))
        return aggregator

    @override
    def is_dense(self, step: int) -> bool:
        return self.wire is None

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """No feedback x full precision x exact mean; with `wire` no feedback x rounding x two passes."""
        if self.wire is None:
            mean = FullPrecisionMean(comm, spec)
            return Parts(NoFeedback(), mean, mean)
        codec = self.codec_for(spec.dtype, ())
        parts = two_pass(comm, spec, codec, codec, None, None)
        parts.feedback.residuals.clear()  # rounding errors are lost, so states have no residuals
        return parts

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return super().message_model(n, dtype, ranks, piece_bytes) if self.wire else summed_model(dtype, ranks)
