"""What the tests of `collectives` share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from collectives.consistency.recursive_doubling import RecursiveDoubling
from collectives.execution.pipelined import PipelinedExecution
from collectives.execution.stepwise import StepwiseExecution
from tests.mpi.collectives.lanes import parametrize_sizes

TIMEOUT_S = 20.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_sizes(metafunc)


@pytest.fixture
def folder(mpi_comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    path: Path = mpi_comm.bcast(tmp_path)
    return path


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``jitter(seed)``: from now on this rank sleeps now and then, so that messages arrive in another order."""

    def start(seed: int) -> None:
        chance = random.Random(seed)

        def delayed(method: Callable[..., Any], part: float) -> Callable[..., Any]:
            def late(*args: Any) -> Any:
                if chance.random() < part:
                    time.sleep(chance.random() * 1e-3)
                return method(*args)

            return late

        monkeypatch.setattr(PipelinedExecution, "turn", delayed(PipelinedExecution.turn, 0.05))
        monkeypatch.setattr(StepwiseExecution, "_step", delayed(StepwiseExecution._step, 0.5))
        monkeypatch.setattr(RecursiveDoubling, "_take", delayed(RecursiveDoubling._take, 0.5))

    return start
