"""Search of all ranks' gradients for NaN and infinity before a step of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from collectives import Communicator
from collectives.caller_warning import warn_caller
from collectives.consistency.descriptions import fingerprint
from mpicomp.torch.devices import all_finite

_CALL = "the check of gradients before an optimizer step"


class FiniteGradients:
    """Verdict of all ranks on the gradients of a step.

    Attributes
    ----------
    skips : bool
        Steps with NaN or infinity are skipped.
    verdict : bool or None
        The gradients of all ranks are finite; None: they are not searched.
    """

    def __init__(self, comm: Communicator, skips: bool) -> None:
        self.skips = skips
        self.verdict: bool | None = None
        self._comm, self._warned = comm, False

    def search(self, gradients: Iterable[Tensor], warn: bool = False) -> bool:
        """Set and return the verdict; collective. Warn of the first bad one."""
        comm = self._comm
        comm.agree(fingerprint(_CALL), lambda: _CALL)
        flags = np.zeros(comm.size, np.int64)
        flags[comm.rank] = not all_finite(gradients)
        ranks = np.flatnonzero(comm.allreduce(flags))
        if ranks.size and warn and not self._warned:
            self._warned = True
            warn_caller(
                f"rank {comm.rank} of {comm.size}: this step and others like it are skipped, as the gradients of "
                f"{len(ranks)} rank(s), the first of them rank {ranks[0]}, hold NaN or infinity"
            )
        self.verdict = not ranks.size
        return self.verdict
