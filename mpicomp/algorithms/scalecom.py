"""ScaleCom: the ranks take turns to choose the elements that all ranks send.

    leader = t mod M
    I      = places of the largest |m + g| of the leader, chunk by chunk; broadcast
    v      = mean over ranks of (m + g)[I]              a dense all-reduce of k values: constant in M
    m      <- m + beta (g - (m + g at I, else 0))       beta < 1: a low-pass filter
    result = v at I, 0 elsewhere

With `momentum`, each rank's u <- momentum u + g takes the place of g; with `masking`, u becomes 0 at I.

As all ranks send the same elements, compression and mean commute, and the number of nonzero elements does not grow with
the number of ranks. The leader's choice suits all ranks if their memories m are similar, which they become.

Departure from the paper: m at I becomes exactly (1 - beta) m; the published rule gives this up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.algorithm import VectorSpec
from mpicomp.aggregator.registration import Grade, Learned, method
from mpicomp.codecs.options import MOST_ELEMENTS, chunk_or_exact, masked_momentum, require, whole
from mpicomp.feedback.memory import Memory
from mpicomp.reducers.choosers import Chooser, LeaderChoice
from mpicomp.reducers.families import SharedIndices

Rates = tuple[int, ...] | tuple[tuple[int, ...], ...]


@method(
    "scalecom",
    Learned(Grade.BEHIND, "ended as dense without momentum, and 1 to 23 points behind with it"),
    forms=({"rate": 10, "chunk": 70, "beta": 0.4, "warmup_steps": 1}, {"rate": 10, "exact": True}),
)
@dataclass(frozen=True)
class ScaleCom(SharedIndices):
    """Options of ScaleCom: the ranks take turns to choose the elements that all of them send.

    Parameters
    ----------
    rate : int
        Number of the vector's elements per element that is sent.
    beta : float
        Fraction of this step's unsent part that goes into the residual, in (0, 1]; below 1 it is a low-pass filter. Use
        1, or 0.1 to 0.3 for large batches with scaled learning rates.
    warmup_steps : int
        Number of steps at the beginning that are dense and leave no residual.
    chunk : int, optional
        Number of elements of which the chunk / rate largest are sent: a multiple of `rate` (of all `rates`). None:
        equal to the rate, so that one element of each chunk is sent.
    exact : bool
        Send the ceil(length / rate) largest of the whole vector (tensor) instead. Slower, with longer indices.
    rates : tuple of int, or one such tuple per vector, optional
        Rate of each tensor, instead of `rate`. Several vectors with one seed, such as an optimizer's buckets, have one
        tuple each, at index `vector_id`.
    momentum : float
        Momentum of each rank before its elements are chosen, at least 0 and below 1; 0: no momentum. Leave
        out that of the optimizer then. Needs ``warmup_steps=0``.
    masking : bool
        Clear the momentum of elements that were sent, so that they do not go on moving the model by old gradients.

    Raises
    ------
    ValueError
        An option is out of range.

    References
    ----------
    Chen et al., "ScaleCom: scalable sparsified gradient compression for communication-efficient distributed training",
    NeurIPS 2020 (arXiv 2104.11125), Algorithm 1; momentum and masking: Lin, Han, Mao, Wang, Dally, "Deep gradient
    compression: reducing the communication bandwidth for distributed training", ICLR 2018 (arXiv 1712.01887).

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> def step(comm):
    ...     scalecom = mpicomp.ScaleCom(rate=2).start(comm, 4)
    ...     gradient = [4.0, 1.0, -3.0, 0.0] if comm.rank == 0 else [2.0, 9.0, -1.0, 0.0]
    ...     return scalecom.aggregate(np.array(gradient, np.float32))  # rank 0 chooses in the first step
    >>> mpicomp.run_local(2, step)[0]
    array([ 3.,  0., -2.,  0.], dtype=float32)
    """

    chunk: int | None = None
    exact: bool = False
    rates: Rates | None = None
    momentum: float = 0.0
    masking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        masked_momentum(self)
        if self.momentum and self.warmup_steps:
            raise ValueError(f"warmup_steps must be 0 with momentum, which dense steps lack, not {self.warmup_steps}")
        flat = [self.rate]
        if self.rates is not None:
            if not isinstance(self.rates, list | tuple) or not self.rates:
                raise ValueError(f"rates must be None or a rate per tensor, not {self.rates!r}")
            nested = isinstance(self.rates[0], list | tuple)
            given: Any = self.rates if nested else (self.rates,)
            rows: list[tuple[int, ...]] = []
            for row in given:
                if not isinstance(row, list | tuple):
                    raise ValueError(f"rates must be all numbers or all tuples of them, not {self.rates!r}")
                for rate in row:
                    require(whole(rate, 1, MOST_ELEMENTS), "rates", "integers of 1 to 2^32", rate)
                rows.append(tuple(int(rate) for rate in row))
            object.__setattr__(self, "rates", tuple(rows) if nested else rows[0])
            flat = [rate for one in rows for rate in one]
        chunk_or_exact(self, flat)

    @property
    def uses_tensor_lengths(self) -> bool:
        """True if `rates` are given, which belong to tensors."""
        return self.rates is not None

    @property
    @override
    def has_rates_by_position(self) -> bool:
        return self.rates is not None

    @override
    def rates_of(self, vector_id: int) -> tuple[int, ...]:
        if self.rates is None:
            return (self.rate,)
        if isinstance(self.rates[0], int):
            return self.rates
        if not vector_id < len(self.rates):
            raise ValueError(f"rates must have a tuple for each vector, not {len(self.rates)}: there is {vector_id}")
        return self.rates[vector_id]

    @property
    @override
    def estimates_mean(self) -> bool:
        return not self.momentum

    @property
    @override
    def local_momentum(self) -> tuple[float, bool] | None:
        return (self.momentum, self.masking) if self.momentum else None

    @property
    @override
    def chunks(self) -> tuple[int | None, bool]:
        return self.chunk, self.exact

    @override
    def chooser(self, comm: Communicator, spec: VectorSpec, memory: Memory) -> Chooser:
        return LeaderChoice(comm, memory)
