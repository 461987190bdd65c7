"""ScaleCom, random-k and true top-k that encode on a device have the bits of those on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, NonFiniteGradient, Ring
from collectives.threads.run_local import run_local
from mpicomp import RandomK, ScaleCom, TrueTopK
from mpicomp.feedback.chunk_parts import join_runs, lay_out
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu import on_device

pytestmark = pytest.mark.usefixtures("made")


@pytest.mark.parametrize(
    ("method", "n", "dtype", "lengths"),
    [
        (ScaleCom(10), 1234, "float32", None),
        (ScaleCom(10, chunk=70, beta=0.4, warmup_steps=1), 500, "float64", None),
        (ScaleCom(10, exact=True), 700, "float32", None),
        (ScaleCom(rates=(5, 10), chunk=20, warmup_steps=1), 640, "float16", (500, 100)),
        (ScaleCom(10), 300, "bfloat16", None),
        (RandomK(10, beta=0.5, warmup_steps=3), 777, "float32", None),
        (RandomK(7), 500, "float16", None),
        (TrueTopK(10, chunk=30), 400, "float32", None),
        (TrueTopK(10, exact=True, beta=0.2), 300, "float64", None),
        (TrueTopK(10), 300, "bfloat16", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("pieces", [False, True], ids=["brief", "pieces"])
def test_results_and_states_are_those_of_the_cpu(
    method: Any, n: int, dtype: str, lengths: Any, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has no device, rank 1 has one, and half way they go on where they were not."""
    if pieces:
        monkeypatch.setattr("mpicomp.reducers.choosers.BRIEF_ELEMENTS", 0)
        monkeypatch.setattr("mpicomp.reducers.shared_indices.BRIEF_ELEMENTS", 0)
        monkeypatch.setattr("mpicomp.feedback.chunk_parts.PART_ELEMENTS", 128)
    on_device.assert_same_as_on_cpu(method, n, dtype, lengths)


def test_ranks_with_workers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicomp.reducers.choosers.BRIEF_ELEMENTS", 0)
    monkeypatch.setattr("mpicomp.feedback.chunk_parts.PART_ELEMENTS", 64)

    def take(comm: Communicator) -> Any:
        method = ScaleCom(5, chunk=20)
        here, there = method.start(comm, 600), method.start(comm, 600, device=on_device.name_of(comm.rank))
        for step in range(2):
            x = on_device.vector(comm.rank, step, 600)
            found = there.aggregate(on_device.given(x, "float32", comm.rank))
            np.testing.assert_array_equal(on_device.bits(found), on_device.bits(here.aggregate(x)))

    run_local(2, take, threads=2)


@pytest.mark.parametrize(
    ("method", "led", "followed"), [(ScaleCom(10), 4 * 80, 4 * 80), (RandomK(10), 0, 0)], ids=["scalecom", "random-k"]
)
def test_only_indices_and_values_cross(method: Any, led: int, followed: int, made: dict[int, FakeDevice]) -> None:
    """The leader's indices go to the host, the others' to the device; two flags go with the values."""

    def take(comm: Communicator) -> None:
        aggregator = method.start(comm, 800, device=f"cuda:{comm.rank}")
        for step in range(2):
            made[comm.rank].copied.clear()
            aggregator.aggregate(FakeArray(on_device.vector(comm.rank, step, 800), index=comm.rank))
            places = led if comm.rank == step % 2 else followed
            assert sum(made[comm.rank].copied) == places + 2 * 4 * 80 + 16

    run_local(2, take)


@pytest.mark.parametrize("method", [ScaleCom(10), RandomK(10), TrueTopK(10), ScaleCom(10, warmup_steps=1)], ids=str)
def test_the_device_may_still_compute_when_a_call_begins(method: Any, made: dict[int, FakeDevice]) -> None:
    n, x = 500, np.zeros(500, np.float32)
    with Communicator() as comm:
        aggregator = method.start(comm, n, device="cuda")
        made[0].run(lambda: np.copyto(x, on_device.vector(0, 0, n)))
        call = aggregator.begin(FakeArray(x))
        expected = method.start(comm, n).aggregate(on_device.vector(0, 0, n))
        np.testing.assert_array_equal(call.wait().there, expected)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        (ScaleCom(10), "float32"),
        (ScaleCom(10, exact=True), "bfloat16"),
        (RandomK(10), "float16"),
        (TrueTopK(10), "float64"),
        (ScaleCom(10, warmup_steps=9), "float32"),
    ],
    ids=str,
)
def test_nan_is_told_on_all_ranks_and_nothing_is_lost(method: Any, dtype: str, bad_rank: int) -> None:
    on_device.assert_nan_is_told_and_nothing_lost(method, 500, dtype, bad_rank)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("method", [ScaleCom(10), ScaleCom(10, chunk=20)], ids=str)
def test_the_rank_that_tells_the_places_finds_its_own_nan(method: Any) -> None:
    with Communicator() as comm:
        aggregator = method.start(comm, 100, device="cuda")
        bad, good = on_device.vector(0, 0, 100), on_device.vector(0, 1, 100)
        bad[77] = np.inf
        with pytest.raises(NonFiniteGradient, match="from rank 0"):
            aggregator.aggregate(on_device.given(bad, "float32", 0))
        aggregator.aggregate(on_device.given(good, "float32", 0))


def aggregated(comm: Communicator, method: Any, there: bool, values: Any) -> list[Any]:
    """Results and residuals of steps of these values, or what was raised."""
    aggregator = method.start(comm, 40, device=on_device.name_of(comm.rank) if there else "cpu")
    found: list[Any] = []
    for x in values:
        try:
            result = aggregator.aggregate(on_device.given(x, "float32", comm.rank) if there else x)
            found.append(on_device.bits(result))
        except NonFiniteGradient as error:
            found.append(error.ranks)
        found.append(aggregator.state_dict()["residual"])
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("method", [ScaleCom(4), RandomK(4), TrueTopK(4)], ids=str)
def test_large_numbers_are_sent_and_their_overflow_is_told_as_on_the_cpu(method: Any) -> None:
    """2e38 twice in the residual overflows, and so does the sum of what two ranks send."""

    def take(comm: Communicator, there: bool) -> list[Any]:
        sign = -1 if comm.rank else 1
        return aggregated(comm, method, there, [np.full(40, value, np.float32) for value in (2e38 * sign, 2e38, 1)])

    here_and_there = (run_local(2, partial(take, there=there), Ring()) for there in (False, True))
    for here, there in zip(*here_and_there, strict=True):
        assert any(one == () for one in here if isinstance(one, tuple))
        for mine, expected in zip(there, here, strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_parts_are_joined_where_chunks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicomp.feedback.chunk_parts.PART_ELEMENTS", 80)
    parts = lay_out([90, 320, 120, 80], [10, 10, 10, 20], 40)
    assert len(parts) == 2 + 4 + 2 + 1
    runs = [(run.start, run.stop, run.keep, run.first, run.last) for run in join_runs(parts)]
    assert runs == [(0, 90, 4, 0, 9), (90, 530, 4, 9, 53), (530, 610, 2, 53, 57)]
    assert join_runs(()) == ()
