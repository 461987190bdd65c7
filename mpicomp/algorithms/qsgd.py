"""QSGD and ECQ-SGD: stochastically quantized gradients, without and with accumulated error.

    q_m = Q(g_m + alpha h_m);   h_m <- beta h_m + (g_m - q_m);   result = mean_m q_m

Q is unbiased (`mpicomp.codecs.quantizer`). QSGD is the case alpha = 0, without state. Codes are gathered, not reduced:
with b bits per element a rank sends (M - 1) b / 32 of a float32 vector's bytes; in a dense ring, 2 (M - 1) / M of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from collectives.annotations import override
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import adopt, integer, number
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.feedback.error_feedback import ErrorAccumulation
from mpicomp.reducers.families import GatheringMethod


@method(
    "qsgd",
    Learned(Grade.BEHIND, "ended with a greater loss than dense in two of three trainings"),
    forms=({}, {"norm": "l2", "bucket": 100, "coding": "entropy"}),
)
@dataclass(frozen=True)
class QSGD(GatheringMethod):
    """Options of QSGD: random quantization to a few levels, unbiased and without a residual.

    Parameters
    ----------
    levels : int
        s, 1 to 127: values are quantized to 2 s + 1 levels.
    bucket : int
        Number of elements that share a norm.
    norm : "linf" or "l2"
    seed : int
        Seed of the random words; equal on all ranks.
    coding : "fixed" or "entropy"
        Codes of fixed length, or entropy-coded: fewer bytes if most codes are 0, for more computing.
    correlated : bool
        True: ranks share random words, shifted so that their errors cancel where their vectors agree. No bytes, and
        each rank stays unbiased.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient quantization and encoding",
    NIPS 2017 (arXiv 1610.02132).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     qsgd = mpicomp.QSGD(levels=4).start(comm, 4)
    ...     return qsgd.aggregate(np.array([1.0, 0.5, -0.25, 0.0], np.float32))  # multiples of max / levels are exact
    >>> mpicomp.run_local(2, step)[0]
    array([ 1.  ,  0.5 , -0.25,  0.  ], dtype=float32)
    """

    levels: int = 4
    bucket: int = 512
    norm: Literal["l2", "linf"] = "linf"
    seed: int = 0
    coding: Literal["fixed", "entropy"] = "fixed"
    correlated: bool = False

    def __post_init__(self) -> None:
        adopt(self, self.codec)
        integer(self, "seed")

    @property
    def codec(self) -> Quantizer:
        """Codec of the options."""
        return Quantizer(self.bucket, self.levels, self.norm, self.coding, self.correlated)

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Quantizer:
        return self.codec


@method("ecq-sgd", Learned(Grade.PROMISING, "had dense's loss in the two convex problems that were tried"))
@dataclass(frozen=True)
class ECQSGD(GatheringMethod):
    """Options of ECQ-SGD: QSGD of the gradient plus a fraction of the accumulated error.

    Parameters
    ----------
    alpha : float
        Fraction of the accumulated error that is added before quantizing; above 0. It must be small: the residual
        stays bounded for alpha^2 gamma + (beta - alpha)^2 < 1, where gamma is the quantizer's relative error.
    beta : float
        Fraction of the accumulated error that is kept from step to step, 0 to 1.
    levels, bucket, norm, seed, coding
        As in `QSGD`.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Wu, Huang, Huang, Zhang, "Error compensated quantized SGD and its applications to large-scale distributed
    optimization", ICML 2018 (arXiv 1806.08054).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     ecq, gradient = mpicomp.ECQSGD(norm="linf").start(comm, 4), np.array([1.0, 0.5, -0.3, 0.0], np.float32)
    ...     return ecq.aggregate(gradient), ecq.residual
    >>> mean, residual = mpicomp.run_local(1, step)[0]
    >>> bool(np.allclose(mean + residual, [1.0, 0.5, -0.3, 0.0]))
    True
    """

    alpha: float = 0.01
    beta: float = 1.0
    levels: int = 4
    bucket: int = 4096
    norm: Literal["l2", "linf"] = "l2"
    seed: int = 0
    coding: Literal["fixed", "entropy"] = "entropy"

    def __post_init__(self) -> None:
        number(self, "alpha", "a finite number above 0 (0 is QSGD)", lambda alpha: 0 < alpha < math.inf)
        number(self, "beta", "between 0 and 1", lambda beta: 0 <= beta <= 1)
        adopt(self, self.codec)
        integer(self, "seed")

    @property
    def codec(self) -> Quantizer:
        """Codec of the options."""
        return Quantizer(self.bucket, self.levels, self.norm, self.coding)

    @override
    def codec_for(self, dtype: str, lengths: tuple[int, ...]) -> Quantizer:
        return self.codec

    @property
    @override
    def error_rule(self) -> ErrorAccumulation:
        return ErrorAccumulation(self.alpha, self.beta)
