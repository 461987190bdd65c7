"""QSGD and ECQ-SGD: stochastically quantized gradients, without and with accumulated error.

    q_m = Q(g_m + alpha h_m);   h_m <- beta h_m + (g_m - q_m);   result = mean_m q_m

Q is unbiased (`mpicomp.codecs.quantizer`). alpha = 0 is QSGD, which keeps nothing. Codes are gathered, not reduced:
with b bits an element a rank sends (M - 1) b / 32 of the vector, against 2 (M - 1) / M of it in a dense ring.

References: QSGD (Alistarh et al., NIPS 2017); ECQ-SGD (Wu et al., ICML 2018, arXiv 1806.08054).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from mpicomp.algorithms.base import Synchronize, Wire
from mpicomp.algorithms.coded import coded_wire
from mpicomp.algorithms.feedback import ErrorAccumulation
from mpicomp.algorithms.gathered import GatheredAggregator
from mpicomp.codecs.quantizer import Quantizer


@dataclass(frozen=True)
class QSGD:
    """Options of QSGD.

    Parameters
    ----------
    levels : int
        s, 1 to 127: values become one of 2 s + 1.
    bucket : int
        Elements that share a norm.
    norm : "linf" or "l2"
    seed : int
        Equal on all ranks.
    coding : "fixed" or "entropy"
        Codes of equally many bits, or entropy-coded: fewer bytes where most codes are 0, for more computing.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    levels: int = 4
    bucket: int = 512
    norm: Literal["l2", "linf"] = "linf"
    seed: int = 0
    coding: Literal["fixed", "entropy"] = "fixed"

    synchronize: ClassVar[Synchronize] = "gradients"

    def __post_init__(self) -> None:
        _ = self.codec

    @property
    def codec(self) -> Quantizer:
        """Of the options."""
        return Quantizer(self.bucket, self.levels, self.norm, self.coding)

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
        return GatheredAggregator(self, comm, n, dtype, vector_id, self.codec, None, self.seed)

    def wire(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> Wire:
        """See `Algorithm.wire`."""
        return coded_wire(self.codec, n, piece_bytes)


@dataclass(frozen=True)
class ECQSGD:
    """Options of ECQ-SGD.

    Parameters
    ----------
    alpha : float
        How much of the accumulated error is added before quantizing; above 0. Small: the residual stays bounded for
        alpha^2 gamma + (beta - alpha)^2 < 1, gamma the quantizer's relative error.
    beta : float
        How much of the accumulated error is kept from step to step, 0 to 1.
    levels, bucket, norm, seed, coding
        As in `QSGD`.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    alpha: float = 0.01
    beta: float = 1.0
    levels: int = 4
    bucket: int = 4096
    norm: Literal["l2", "linf"] = "l2"
    seed: int = 0
    coding: Literal["fixed", "entropy"] = "entropy"

    synchronize: ClassVar[Synchronize] = "gradients"

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is above 0, not {self.alpha}; QSGD is ECQ-SGD with alpha 0")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta lies between 0 and 1, not at {self.beta}")
        _ = self.codec

    @property
    def codec(self) -> Quantizer:
        """Of the options."""
        return Quantizer(self.bucket, self.levels, self.norm, self.coding)

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
        feedback = ErrorAccumulation(self.alpha, self.beta)
        return GatheredAggregator(self, comm, n, dtype, vector_id, self.codec, feedback, self.seed)

    def wire(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> Wire:
        """See `Algorithm.wire`."""
        return coded_wire(self.codec, n, piece_bytes)
