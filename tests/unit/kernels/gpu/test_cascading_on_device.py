"""Cascading compression has the bits of the CPU where hops compress on a device, and ranks of both kinds mix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from collectives import Communicator, DoubleTree, HalvingDoubling, Ring, Star, Torus, Tree
from collectives.execution.pipelined import runs_stepwise
from collectives.threads.run_local import run_local
from mpicomp import CascadingSSDM
from mpicomp.codecs import StochasticSign
from mpicomp.reducers.cascade import Cascade
from tests.contracts import draw_at
from tests.fake_device import FakeArray, FakeDevice
from tests.unit.kernels.gpu import on_device
from tests.unit.kernels.gpu.on_device import (
    assert_nan_is_told_and_nothing_lost,
    assert_same_as_on_cpu,
    bits,
    given,
    name_of,
    start,
    train,
    vector,
)

pytestmark = pytest.mark.usefixtures("made")

N = 700


@pytest.mark.parametrize(
    ("method", "n", "dtype", "ranks"),
    [
        (CascadingSSDM(), 4200, "float32", 2),
        (CascadingSSDM(normalise=True, seed=3), 2 * 4096 + 77, "float32", 3),
        (CascadingSSDM(), 4200, "float64", 2),
        (CascadingSSDM(normalise=True), 333, "float64", 3),
        (CascadingSSDM(), 333, "float16", 2),
        (CascadingSSDM(normalise=True), 333, "float16", 3),
        (CascadingSSDM(), 4200, "bfloat16", 2),
        (CascadingSSDM(), 300, "float32", 1),
        (CascadingSSDM(), 1, "bfloat16", 2),
        (CascadingSSDM(normalise=True), 0, "float64", 2),
    ],
    ids=str,
)
def test_results_and_states_are_those_of_the_cpu(method: CascadingSSDM, n: int, dtype: str, ranks: int) -> None:
    assert_same_as_on_cpu(method, n, dtype, ranks=ranks)


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each rank take a step on the device and one on the CPU: a plan sends the same messages in every step."""
    monkeypatch.setattr(on_device, "STEPS", 2)


def assert_ranks_of_both_kinds_agree(
    ranks: int, topology: Any, on_devices: tuple[int, ...], n: int = N, **options: Any
) -> None:
    def results(*there: int) -> list[list[Any]]:
        method = CascadingSSDM(normalise=True)
        return run_local(ranks, lambda comm: train(comm, method, n, "float32", there), topology, **options)

    for mine, expected in zip(results(*on_devices), results(), strict=True):
        for one, other in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("two_steps")
@pytest.mark.parametrize(
    ("topology", "ranks", "n", "polls"),
    [
        (Ring(), 5, 4 * 4096 + 9, 60),
        (Tree(), 5, N, 1),
        (DoubleTree(), 4, 4096 + N, 60),
        (HalvingDoubling(), 5, 4096 + N, 1),
        (Torus(2, 2), 4, 3 * 4096 + N, 1),
        (Star(), 4, N, 60),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_plan_goes_over_devices(
    topology: Any, ranks: int, n: int, polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 3 have one, which ends its work soon or long after the next messages; then the others have."""
    monkeypatch.setattr("tests.fake_device.POLLS", polls)
    assert_ranks_of_both_kinds_agree(ranks, topology, (0, 3), n)


@pytest.mark.usefixtures("two_steps")
def test_plans_run_step_by_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spied(program: Any, payload: Any) -> bool:
        seen.append(runs_stepwise(program, payload))
        return seen[-1]

    monkeypatch.setattr(Cascade, "brief", True)
    monkeypatch.setattr("collectives.execution.pipelined.runs_stepwise", spied)
    assert_ranks_of_both_kinds_agree(3, Ring(), (1,), 2 * 4096 + 9)
    assert seen
    assert all(seen)


@pytest.mark.usefixtures("two_steps")
def test_several_threads_have_the_same_bits() -> None:
    assert_ranks_of_both_kinds_agree(3, Ring(), (0, 1), 2 * 4096 + 9, threads=2)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 3e37), ("float64", 1e300), ("float64", 1e38)])
def test_sums_beyond_float32_are_held_as_on_the_cpu(dtype: str, scale: float) -> None:
    assert_same_as_on_cpu(CascadingSSDM(), 300, dtype, scale=scale, ranks=3)


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_nan_is_an_error_on_all_ranks_and_nothing_is_lost(bad_rank: int, dtype: str) -> None:
    assert_nan_is_told_and_nothing_lost(CascadingSSDM(), 500, dtype, bad_rank)


@pytest.mark.parametrize("normalise", [False, True])
def test_only_payloads_and_a_norm_cross(normalise: bool, made: dict[int, FakeDevice]) -> None:
    """To the host what is sent, also the chunk that this rank completes, and back what it receives."""
    chunk, ranks = 4096, 3

    def take(comm: Communicator) -> None:
        aggregator = start(comm, CascadingSSDM(normalise), ranks * chunk, "float32", comm.rank == 1)
        x = given(vector(comm.rank, 0, ranks * chunk), "float32", 1 if comm.rank == 1 else None)
        aggregator.aggregate(x)

    run_local(ranks, take, Ring())
    assert sorted(made[1].copied) == [4] + [StochasticSign().nbytes(chunk)] * (ranks + 2 * (ranks - 1))


def test_calls_in_flight_have_the_bits_of_calls_on_the_cpu() -> None:
    def take(comm: Communicator) -> None:
        index = 1 if comm.rank == 1 else None
        on_cpu, at_once = (
            [CascadingSSDM().start(comm, N, vector_id=k, device=place) for k in range(3)]
            for place in ("cpu", name_of(1) if index else "cpu")
        )
        vectors = [vector(comm.rank, k, N) for k in range(3)]
        expected = [one.aggregate(x) for one, x in zip(on_cpu, vectors, strict=True)]
        handles = [one.begin(given(x, "float32", index)) for one, x in zip(at_once, vectors, strict=True)]
        for handle, want in zip(reversed(handles), reversed(expected), strict=True):
            np.testing.assert_array_equal(bits(handle.wait()), bits(want))

    run_local(2, take, Ring())


def test_vectors_of_devices_are_not_kept(made: dict[int, FakeDevice]) -> None:
    with Communicator() as comm:
        aggregator = CascadingSSDM().start(comm, N, device="cuda")
        aggregator.aggregate(FakeArray(vector(0, 0, N)))
        assert not len(aggregator.feedback._values)


def test_the_codec_returns_on_a_device_the_error_that_it_raises_on_the_host(device: str) -> None:
    codec, payload = StochasticSign(), torch.zeros(StochasticSign().nbytes(65), dtype=torch.uint8, device=device)
    for value, well in ((1.0, True), (torch.nan, False)):
        values = torch.full((65,), value, device=device)
        assert bool(codec.encode(values, payload, draw=draw_at())) is well
    sums = torch.ones(65, device=device)
    codec.add(payload, sums)  # of a norm that is not finite nothing is added
    assert bool((sums == 1).all())
