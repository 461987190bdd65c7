"""Marsit that encodes on a device has the bits of Marsit on the CPU, and ranks with and without devices mix."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator
from collectives.threads.run_local import run_local
from mpicomp import Marsit
from mpicomp.feedback.base import Feedback
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu.on_device import (
    assert_nan_is_told_and_nothing_lost,
    assert_same_as_on_cpu,
    bits,
    given,
    start,
    vector,
)

pytestmark = pytest.mark.usefixtures("made")

REPORT = 16  # bytes of a block: sum of its magnitudes, and clipped elements
SCALES = 48  # bytes of a tensor in each step


@pytest.mark.parametrize(
    ("method", "n", "dtype", "lengths"),
    [
        (Marsit(full_precision_every=3), 4500, "float32", None),
        (Marsit(full_precision_every=None, residual="paper"), 700, "float32", None),
        (Marsit(full_precision_every=2, residual="paper", transactional=True), 300, "float64", None),
        (Marsit(full_precision_every=None, global_step=0.1, compensation=False), 300, "float32", None),
        (Marsit(full_precision_every=None, gamma=2.0, clip=0.5, nonfinite="skip"), 640, "float32", (500, 100)),
        (Marsit(full_precision_every=3), 700, "float16", None),
        (Marsit(full_precision_every=2, nonfinite="skip", transactional=True), 640, "bfloat16", (500, 100)),
        (Marsit(full_precision_every=2, residual="paper"), 333, "bfloat16", None),
        (Marsit(full_precision_every=3, winners=1), 8448, "float32", (4500, 3900)),
        (Marsit(full_precision_every=None, winners=2), 4200, "float16", None),
        (Marsit(full_precision_every=2, winners=2, compensation=False, global_step=0.1), 300, "float64", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_results_and_states_are_those_of_the_cpu(
    method: Marsit, n: int, dtype: str, lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has no device, and rank 1 has one. Longer vectors go piece by piece, while others are encoded."""
    if n > 600:
        for module in ("sign_merge", "shared_selection"):
            monkeypatch.setattr(f"mpicomp.reducers.{module}.BRIEF_ELEMENTS", 0)
    assert_same_as_on_cpu(method, n, dtype, lengths)


@pytest.mark.parametrize("winners", [1, 2])
def test_winners_of_three_ranks_are_those_of_the_cpu(winners: Any) -> None:
    assert_same_as_on_cpu(Marsit(full_precision_every=None, winners=winners), 700, "bfloat16", ranks=3)


def test_of_winners_a_rank_s_own_signs_cross_and_those_of_all_come_back(made: dict[int, FakeDevice]) -> None:
    n, copied = 8192, list[int]()

    def take(comm: Communicator) -> None:
        aggregator = Marsit(full_precision_every=None, winners=1).start(comm, n, device=f"cuda:{comm.rank}")
        for step in range(2):
            made[comm.rank].copied.clear()
            aggregator.aggregate(FakeArray(vector(comm.rank, step, n), index=comm.rank))
        copied.append(sum(made[comm.rank].copied))

    run_local(2, take)
    assert copied == [n // 2 // 8 + n // 8 + REPORT * n // 4096 + SCALES] * 2


def test_only_signs_and_sums_cross_between_full_precision_rounds(made: dict[int, FakeDevice]) -> None:
    n = 8192
    with Communicator() as comm:
        aggregator = Marsit(full_precision_every=None).start(comm, n, device="cuda")
        for step in range(2):
            made[0].copied.clear()
            aggregator.aggregate(FakeArray(vector(0, step, n)))
        assert sum(made[0].copied) == 2 * n // 8 + REPORT * n // 4096 + SCALES


def test_the_device_may_still_compute_when_a_call_begins(made: dict[int, FakeDevice]) -> None:
    n, x = 500, np.zeros(500, np.float32)
    with Communicator() as comm:
        method = Marsit(full_precision_every=None)
        aggregator = method.start(comm, n, device="cuda")
        made[0].run(lambda: np.copyto(x, vector(0, 0, n)))
        call = aggregator.begin(FakeArray(x))
        expected = method.start(comm, n).aggregate(vector(0, 0, n))
        np.testing.assert_array_equal(call.wait().there, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_is_told_on_all_ranks_and_a_transactional_step_can_be_repeated(dtype: str) -> None:
    assert_nan_is_told_and_nothing_lost(Marsit(full_precision_every=None, transactional=True), 500, dtype, bad_rank=0)


def test_nan_in_a_full_precision_round_is_told() -> None:
    assert_nan_is_told_and_nothing_lost(Marsit(full_precision_every=1, transactional=True), 300, "float16", bad_rank=0)


@pytest.mark.parametrize("there", [0, 1])
def test_a_step_with_nan_is_skipped_by_all_without_waiting_for_a_device(
    there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has the NaN, and one of both ranks a device."""

    def only_on_the_host(feedback: Feedback, values: Any) -> bool:
        assert feedback.space.is_host
        return bool(feedback.kernels.sign.all_finite(values))

    monkeypatch.setattr(Feedback, "all_finite", only_on_the_host)
    n, method = 300, Marsit(full_precision_every=None, nonfinite="skip")

    def take(comm: Communicator) -> None:
        aggregator = start(comm, method, n, "float16", comm.rank == there)
        for step in range(2):
            x = vector(comm.rank, step, n, "float16")
            if step == 1 and comm.rank == 0:
                x[7] = np.nan
            before = aggregator.state_dict()
            result = bits(aggregator.aggregate(given(x, "float16", comm.rank if comm.rank == there else None)))
        assert not result.any()
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], before["residual"])
        assert aggregator.feedback.skipped == 1

    run_local(2, take)


def test_memory_of_full_precision_rounds_is_taken_at_the_start(made: dict[int, FakeDevice]) -> None:
    with Communicator() as comm:
        aggregator = Marsit(full_precision_every=1).start(comm, 300, device="cuda")
        made[0].has_memory = False
        aggregator.aggregate(FakeArray(vector(0, 0, 300)))


def test_full_precision_rounds_and_measuring_tell_of_no_clipped_elements(made: dict[int, FakeDevice]) -> None:
    n, fractions = 300, []
    with Communicator() as comm:
        aggregator = Marsit(full_precision_every=2, clip=0.1).start(comm, n, device="cuda")
        for step in range(3):
            aggregator.aggregate(FakeArray(vector(0, step, n)))
            fractions.append(aggregator.feedback.clipped_fraction)
    assert fractions[0] == fractions[2] == 0
    assert fractions[1] > 0


def test_a_device_that_there_is_not_is_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="there is no device 'tpu': write 'cpu', 'cuda' or 'cuda:1'"):
        Marsit().start(comm, 10, device="tpu")


def test_vectors_elsewhere_are_refused_on_all_ranks(made: dict[int, FakeDevice]) -> None:
    def take(comm: Communicator) -> None:
        aggregator = Marsit().start(comm, 10, device=f"cuda:{comm.rank}")
        x = np.zeros(10, np.float32)
        wrong = ValueError, r"not on fake:0: pass a copy there"
        with pytest.raises(*wrong[:1] if comm.rank == 0 else (CollectiveMismatch,), match=wrong[1]):
            aggregator.aggregate(x if comm.rank == 0 else FakeArray(x, index=1))
        with pytest.raises(*wrong[:1] if comm.rank == 0 else (CollectiveMismatch,), match=wrong[1]):
            aggregator.aggregate(FakeArray(x, index=1))

    run_local(2, take)


@pytest.mark.parametrize("residual", ["own", "paper"])
def test_memory_of_a_device_is_freed_without_the_garbage_collector(residual: Any) -> None:
    with Communicator() as comm:
        aggregator = start(comm, Marsit(residual=residual, full_precision_every=2), 300, "float32", True)
        for step in range(3):
            aggregator.aggregate(given(vector(0, step, 300), "float32", 0))
        aggregator.state_dict()
        gc.collect()
        gc.disable()
        try:
            kept = weakref.ref(aggregator.feedback.in_place)
            del aggregator
            assert kept() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("residual", ["own", "paper"])
def test_step_sizes_that_crossed_ahead_of_their_step_do_not_outlive_a_state_or_an_undone_step(residual: Any) -> None:
    method, n = Marsit(None, residual=residual, transactional=True), 700

    def train(comm: Communicator, there: tuple[int, ...]) -> list[Any]:
        aggregator = start(comm, method, n, "float32", comm.rank in there)

        def step(number: int, scale: float) -> Any:
            x = given(vector(comm.rank, number, n, scale=scale), "float32", comm.rank if comm.rank in there else None)
            return bits(aggregator.aggregate(x))

        results = [step(0, 1.0), step(1, 10.0)]
        state = aggregator.state_dict()
        results += [step(2, 100.0), step(3, 1000.0)]
        aggregator.undo()
        results.append(step(4, 0.1))
        aggregator.load_state_dict(state)
        return [*results, step(5, 1.0), step(6, 1.0)]

    expected, found = (run_local(2, lambda comm, on=on: train(comm, on)) for on in ((), (1,)))
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("method", [Marsit(full_precision_every=2), Marsit(winners=2)], ids=["signs", "winners"])
def test_the_shortest_vectors_are_encoded_too(method: Marsit, n: int) -> None:
    assert_same_as_on_cpu(method, n, "bfloat16")
