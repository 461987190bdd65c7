"""Auto on a device: its dense steps cross to the host, and what was pending there is averaged when it goes dense."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.threads.run_local import run_local
from mpicomp import Auto, Dense, Marsit, ScaleCom
from mpicomp.auto.trials import TrialTimes
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu import on_device

pytestmark = pytest.mark.usefixtures("made")

DENSE, COMPRESSED = 3, 3  # steps of a trial with trial_steps=2


@pytest.fixture(autouse=True)
def dense_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trial end with the choice of dense, for steps of any length."""
    monkeypatch.setattr("mpicomp.auto.chosen.slowest", lambda rows: TrialTimes([1.0, 3.0, 3.0], [[1.0, 3.0, 3.0]] * 4))


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (Marsit(2, nonfinite="skip"), "float32"),
        (Marsit(None), "float16"),
        (ScaleCom(10, beta=0.5), "float64"),
        (ScaleCom(10), "bfloat16"),
        (Dense(wire="float16"), "bfloat16"),
    ],
    ids=str,
)
def test_results_and_states_are_those_of_the_cpu(method: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks change places in the middle of the compressed steps, and then leave these behind."""
    monkeypatch.setattr(on_device, "STEPS", DENSE + COMPRESSED + 2)
    on_device.assert_same_as_on_cpu(Auto(method, trial_steps=2), 300, dtype)


def test_what_is_pending_on_the_device_is_part_of_the_mean(made: dict[int, FakeDevice]) -> None:
    """Sums of all vectors and of all results agree: nothing is lost, and nothing is left. Vectors are there late."""

    def take(comm: Communicator) -> None:
        aggregator = Auto(ScaleCom(10), trial_steps=2).start(comm, 200, device=f"cuda:{comm.rank}")
        total = np.zeros(200)
        for step in range(DENSE + COMPRESSED + 1):
            x = on_device.vector(comm.rank, step, 200)
            late = np.zeros_like(x)
            made[comm.rank].copied.clear()
            made[comm.rank].run(partial(np.copyto, late, x))
            total += aggregator.aggregate(FakeArray(late, index=comm.rank)).there
            # the vector to the host, its mean back; what is pending likewise, and zeros in its place; then a flag
            crossed = sorted(made[comm.rank].copied)
            assert step < DENSE + COMPRESSED or crossed == [1, *5 * [800]]
            pending = aggregator.state_dict()["residual"]
            assert pending.any() == (DENSE <= step < DENSE + COMPRESSED)
        steps = range(DENSE + COMPRESSED + 1)
        exact = sum(on_device.vector(rank, step, 200).astype(float) for rank in range(2) for step in steps) / 2
        np.testing.assert_allclose(total, exact, atol=1e-5)

    run_local(2, take)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_nan_is_told_on_all_ranks_and_nothing_is_lost(bad_rank: int) -> None:
    on_device.assert_nan_is_told_and_nothing_lost(Auto(ScaleCom(10), trial_steps=2), 300, "float32", bad_rank)


def test_a_step_with_nan_is_skipped_where_the_method_skips(comm: Communicator) -> None:
    aggregator = Auto(Marsit(nonfinite="skip"), trial_steps=2).start(comm, 100, device="cuda")
    bad = on_device.vector(0, 0, 100)
    bad[3] = np.nan
    assert not on_device.bits(aggregator.aggregate(on_device.given(bad, "float32", 0))).any()
    assert aggregator.feedback.skipped == 1


def test_it_encodes_on_devices_as_its_method_does() -> None:
    class Some(Marsit):
        def encodes_on_devices(self, dtype: str) -> bool:
            return dtype == "float64"

    assert Auto(Some()).encodes_on_devices("float64")
    assert not Auto(Some()).encodes_on_devices("float16")
