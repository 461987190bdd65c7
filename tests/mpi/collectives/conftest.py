"""What the tests of `collectives` share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from collectives.execute import Execution
from tests.mpi.collectives.lanes import parametrize_sizes

TIMEOUT_S = 20.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_sizes(metafunc)


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``jitter(seed)``: from now on this rank sleeps now and then, so that messages arrive in another order."""

    def start(seed: int) -> None:
        turn, chance = Execution.turn, random.Random(seed)

        def late(self: Execution) -> bool:
            if chance.random() < 0.05:
                time.sleep(chance.random() * 1e-3)
            return turn(self)

        monkeypatch.setattr(Execution, "turn", late)

    return start
