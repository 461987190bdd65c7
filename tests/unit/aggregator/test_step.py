"""The driver of a step: the parts it needs, and the hooks that it calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from collectives import Communicator
from mpicomp import TopKSGD
from mpicomp.aggregator.algorithm import Driver, Parts, VectorSpec
from mpicomp.aggregator.step import StepDriver
from mpicomp.reducers.full_precision_mean import FullPrecisionMean


def test_steps_in_full_precision_need_a_mean_and_the_steps_it_makes(comm: Communicator) -> None:
    @dataclass(frozen=True)
    class WithoutMean(TopKSGD):
        def is_dense(self, step: int) -> bool:
            return step < 2

    with pytest.raises(TypeError, match="need both: is_dense of the options, and dense of the parts"):
        WithoutMean().start(comm, 100)
    spec = VectorSpec(100, "float32")
    parts = TopKSGD().parts(comm, spec)._replace(dense=FullPrecisionMean(comm, spec))
    with pytest.raises(TypeError, match="need both"):
        StepDriver(comm, parts)


def test_a_driver_of_a_users_own_prepares_steps(comm: Communicator) -> None:
    prepared: list[int] = []

    class Preparing(StepDriver):
        def prepare(self, step: int) -> None:
            prepared.append(step)

    @dataclass(frozen=True)
    class Method(TopKSGD):
        def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
            parts = self.parts(comm, spec)
            return parts, Preparing(comm, parts)

    aggregator = Method().start(comm, 100)
    for _ in range(2):
        aggregator.aggregate(np.ones(100, np.float32))
    assert prepared == [0, 1]
