"""Marsit that encodes on a device has the bits of Marsit on the CPU, and ranks with and without devices mix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient, Ring, devices
from collectives.threads.run_local import run_local
from mpicomp import QSGD, Marsit
from tests.fake_device import FakeArray, FakeDevice

pytest.importorskip("triton", reason="kernels for GPUs need Triton, or its interpreter")

STEPS = 4


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Give the fake devices, which are made when they are asked for."""
    known: dict[int, FakeDevice] = {}
    monkeypatch.setitem(devices.MAKERS, devices.CUDA, lambda index: known.setdefault(index, FakeDevice(index)))
    return known


def vector(rank: int, step: int, n: int, dtype: Any = np.float32) -> Any:
    values = np.random.default_rng((rank, step)).standard_normal(n).astype(dtype)
    values[::7] = 0
    return values


def train(
    comm: Communicator, method: Marsit, n: int, dtype: str, on_devices: tuple[int, ...], lengths: Any = None
) -> list[Any]:
    """All results, and the last state; half way another aggregator goes on from the first one's state."""
    there = comm.rank in on_devices
    start = {"dtype": dtype, "tensor_lengths": lengths, "device": f"cuda:{comm.rank}" if there else "cpu"}
    aggregator, results = method.start(comm, n, **start), []
    for step in range(STEPS):
        if step == STEPS // 2:
            state = aggregator.state_dict()
            aggregator = method.start(comm, n, **start)
            aggregator.load_state_dict(state)
        x = vector(comm.rank, step, n, dtype)
        result = aggregator.aggregate(FakeArray(x, index=comm.rank) if there else x)
        results.append((result.there if there else result).copy())
    state = aggregator.state_dict()
    results.append(np.array(aggregator.feedback.clipped_fraction))
    return [*results, *(np.asarray(state[key]) for key in sorted(state) if key != "method")]


@pytest.mark.parametrize(
    ("method", "n", "dtype", "lengths"),
    [
        (Marsit(full_precision_every=3), 4500, "float32", None),
        (Marsit(full_precision_every=None, residual="paper"), 700, "float32", None),
        (Marsit(full_precision_every=2, residual="paper", transactional=True), 300, "float64", None),
        (Marsit(full_precision_every=None, global_step=0.1, compensation=False), 300, "float32", None),
        (Marsit(full_precision_every=None, gamma=2.0, clip=0.5, nonfinite="skip"), 640, "float32", (500, 100)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_results_and_states_are_those_of_the_cpu(
    method: Marsit, n: int, dtype: str, lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has no device, and rank 1 has one. Longer vectors go piece by piece, while others are encoded."""
    if n > 600:
        monkeypatch.setattr("mpicomp.reducers.sign_merge.BRIEF_ELEMENTS", 0)
    here, there = (
        run_local(2, lambda comm, on=on: train(comm, method, n, dtype, on, lengths), Ring(), piece_bytes=512)
        for on in ((), (1,))
    )
    for rank in range(2):
        for mine, expected in zip(there[rank], here[rank], strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_only_signs_and_sums_cross_between_full_precision_rounds(made: dict[int, FakeDevice]) -> None:
    n = 8192
    with Communicator() as comm:
        aggregator = Marsit(full_precision_every=None).start(comm, n, device="cuda")
        for step in range(2):
            made[0].copied.clear()
            aggregator.aggregate(FakeArray(vector(0, step, n)))
        sums = 8 * n // 4096
        assert sum(made[0].copied) == 2 * n // 8 + sums + 8


def test_the_device_may_still_compute_when_a_call_begins(made: dict[int, FakeDevice]) -> None:
    n, x = 500, np.zeros(500, np.float32)
    with Communicator() as comm:
        method = Marsit(full_precision_every=None)
        aggregator = method.start(comm, n, device="cuda")
        made[0].run(lambda: np.copyto(x, vector(0, 0, n)))
        call = aggregator.begin(FakeArray(x))
        expected = method.start(comm, n).aggregate(vector(0, 0, n))
        np.testing.assert_array_equal(call.wait().there, expected)


def test_nan_is_told_on_all_ranks_and_a_transactional_step_can_be_repeated() -> None:
    n, method = 500, Marsit(full_precision_every=None, transactional=True)

    def take(comm: Communicator) -> Any:
        aggregator = method.start(comm, n, device=f"cuda:{comm.rank}" if comm.rank == 0 else "cpu")

        def given(values: Any) -> Any:
            return FakeArray(values, index=0) if comm.rank == 0 else values

        aggregator.aggregate(given(vector(comm.rank, 0, n)))
        before = aggregator.state_dict()
        bad = vector(comm.rank, 1, n)
        if comm.rank == 0:
            bad[77] = np.nan
        with pytest.raises(NonFiniteGradient, match="from rank 0"):
            aggregator.aggregate(given(bad))
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], before["residual"])
        aggregator.aggregate(given(vector(comm.rank, 2, n)))

    run_local(2, take, Ring())


def test_full_precision_rounds_and_measuring_tell_of_no_clipped_elements(made: dict[int, FakeDevice]) -> None:
    n, fractions = 300, []
    with Communicator() as comm:
        aggregator = Marsit(full_precision_every=2, clip=0.1).start(comm, n, device="cuda")
        for step in range(3):
            aggregator.aggregate(FakeArray(vector(0, step, n)))
            fractions.append(aggregator.feedback.clipped_fraction)
    assert fractions[0] == fractions[2] == 0
    assert fractions[1] > 0


def test_what_cannot_be_encoded_on_a_device_is_refused(comm: Communicator) -> None:
    with pytest.raises(
        ValueError, match=r"QSGD.* encodes vectors of float32 on the CPU alone, not on cuda; leave out device"
    ):
        QSGD().start(comm, 10, device="cuda")
    with pytest.raises(ValueError, match="on the CPU alone"):
        Marsit(winners=1).start(comm, 10, device="cuda")
    with pytest.raises(ValueError, match="encodes vectors of float16 on the CPU alone, not on cuda"):
        Marsit().start(comm, 10, dtype="float16", device="cuda")
    with pytest.raises(ValueError, match="there is no device 'tpu': write 'cpu', 'cuda' or 'cuda:1'"):
        Marsit().start(comm, 10, device="tpu")


def test_vectors_elsewhere_are_refused_on_all_ranks() -> None:
    def take(comm: Communicator) -> None:
        aggregator = Marsit().start(comm, 10, device=f"cuda:{comm.rank}")
        x = np.zeros(10, np.float32)
        wrong = ValueError, r"not on fake:0: pass a copy there"
        with pytest.raises(*wrong[:1] if comm.rank == 0 else (CollectiveMismatch,), match=wrong[1]):
            aggregator.aggregate(x if comm.rank == 0 else FakeArray(x, index=1))
        with pytest.raises(*wrong[:1] if comm.rank == 0 else (CollectiveMismatch,), match=wrong[1]):
            aggregator.aggregate(FakeArray(x, index=1))

    run_local(2, take)
