"""A method may bring a feedback of its own to the all-gather, over any topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.threads.run_local import run_local
from mpicomp import LocalTopK
from mpicomp.aggregator.algorithm import Parts
from mpicomp.codecs import OneBit
from mpicomp.feedback.codes import GatheredCodes
from mpicomp.feedback.error_feedback import ErrorFeedback
from mpicomp.reducers.all_gather import all_gather

N = 1000


class Doubled(GatheredCodes):
    """Codes of twice the vector."""

    def _part(self, cut: range) -> NDArray[Any]:
        return 2 * super()._part(cut)


@dataclass(frozen=True)
class TwiceTheSigns(LocalTopK):
    """One bit of twice the vector, with error feedback."""

    feedback: Any = Doubled

    def parts(self, comm: Any, spec: Any) -> Parts:
        return all_gather(comm, spec, OneBit(64), ErrorFeedback(), feedback=self.feedback)


@pytest.mark.parametrize("topology", ["ring", "star"])
def test_a_feedback_of_ones_own_encodes_and_keeps_the_residual(topology: str) -> None:
    def take(comm: Any) -> tuple[Any, Any]:
        vector = np.random.default_rng(comm.rank).standard_normal(N).astype(np.float32)
        own, given = TwiceTheSigns().start(comm, N), TwiceTheSigns(feedback=GatheredCodes).start(comm, N)
        for _ in range(3):
            result, expected = own.aggregate(vector), given.aggregate(2 * vector)
        assert isinstance(own.feedback, Doubled)
        np.testing.assert_array_equal(own.residual, given.residual)
        return result, expected

    for result, expected in run_local(3, take, topology):
        np.testing.assert_array_equal(result, expected)
