"""Signs that MPI reads from a device are merged there, with the bits of signs that cross to the host."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, HalvingDoubling, Ring, Topology, Torus, Tree
from collectives.arrays.gpu_mpi import verdict
from collectives.arrays.gpu_mpi.verdict import Outcome
from collectives.threads.run_local import run_local
from mpicomp import Marsit
from mpicomp.reducers import sign_merge
from tests.fake_device import FakeArray, FakeDevice, FakeStream
from tests.unit.kernels.gpu.on_device import bits, start, train, vector

REPORT, SCALES = 16, 48  # bytes of a block of 4096 elements, and of a tensor in each step
N = 2 * 4096 + 700


@pytest.fixture(autouse=True)
def aware(monkeypatch: pytest.MonkeyPatch, made: dict[int, FakeDevice]) -> None:
    """Let MPI take memory of fake devices, which is the host's, for vectors of any length."""
    monkeypatch.setattr(verdict, "carries", lambda comm: True)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(works=True, said="was faked"))
    monkeypatch.setattr(sign_merge, "DIRECT_BYTES", 0)


@pytest.mark.parametrize(
    ("topology", "ranks", "stepwise"),
    [
        *((Ring(), 3, stepwise) for stepwise in (False, True)),
        *((Tree(), 3, stepwise) for stepwise in (False, True)),
        *((Torus(2, 2), 4, False), (HalvingDoubling(), 4, True)),
    ],
    ids=str,
)
def test_bits_are_those_of_the_host_whatever_the_topology(
    topology: Topology, ranks: int, stepwise: bool, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has no device; half way ranks with and without one change places."""
    if not stepwise:
        monkeypatch.setattr(sign_merge, "BRIEF_ELEMENTS", 0)
    method = Marsit(full_precision_every=3, global_step=0.1)
    on = tuple(rank for rank in range(ranks) if rank != 1)
    there, here = (
        run_local(ranks, lambda comm, on=on: train(comm, method, N, "float32", on), topology, piece_bytes=512)
        for on in (on, ())
    )
    for one, expected in zip(there, here, strict=True):
        for mine, other in zip(one, expected, strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(
    ("method", "dtype", "lengths"),
    [
        (Marsit(full_precision_every=None, residual="paper", transactional=True), "bfloat16", None),
        (Marsit(full_precision_every=2, nonfinite="skip"), "float16", (5000, N - 5056)),
        (Marsit(full_precision_every=None, compensation=False, global_step=0.1), "float64", None),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bits_are_those_of_the_host_with_all_options(method: Marsit, dtype: str, lengths: Any) -> None:
    there, here = (
        run_local(2, lambda comm, on=on: train(comm, method, N, dtype, on, lengths), Ring()) for on in ((0, 1), ())
    )
    for one, expected in zip(there, here, strict=True):
        for mine, other in zip(one, expected, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_no_sign_crosses_to_the_host_and_the_next_step_may_begin_at_once(made: dict[int, FakeDevice]) -> None:
    def take(comm: Communicator) -> tuple[int, list[Any]]:
        aggregator, results = Marsit(None).start(comm, N, device=f"cuda:{comm.rank}"), list[Any]()
        assert not isinstance(aggregator.reducer.bits, np.ndarray)
        for step in range(4):
            made[comm.rank].copied.clear()
            stream = FakeStream()
            results.append(aggregator.aggregate(FakeArray(vector(comm.rank, step, N), index=comm.rank), stream=stream))
        stream.reach()
        return sum(made[comm.rank].copied), [bits(result) for result in results]

    def on_host(comm: Communicator) -> list[Any]:
        aggregator = Marsit(None).start(comm, N)
        return [bits(aggregator.aggregate(vector(comm.rank, step, N))) for step in range(4)]

    expected = run_local(2, on_host, Ring())
    for (crossed, found), other in zip(run_local(2, take, Ring()), expected, strict=True):
        assert crossed <= 2 * (REPORT * 3 + SCALES)  # of the last step, and of the one before
        np.testing.assert_array_equal(found, other)


def test_the_swing_of_the_residual_is_found_from_signs_on_the_device() -> None:
    def swing(comm: Communicator, there: bool) -> float:
        aggregator = start(comm, Marsit(None, residual="paper", global_step=1e-4), N, "float32", there)
        for step in range(2):
            x = vector(comm.rank, step, N)
            aggregator.aggregate(FakeArray(x, index=comm.rank) if there else x)
        return float(aggregator.feedback.swing())

    with warnings.catch_warnings():
        there, here = (run_local(2, lambda comm, on=on: swing(comm, on), Ring()) for on in (True, False))
    assert there == here
    assert min(here) > 0


def test_short_vectors_cross_as_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_merge, "DIRECT_BYTES", 8 * -(-N // 64) + 1)

    def take(comm: Communicator) -> bool:
        return isinstance(start(comm, Marsit(), N, "float32", True).reducer.bits, np.ndarray)

    assert run_local(2, take, Ring()) == [True, True]


def test_merges_are_compiled_at_the_start(made: dict[int, FakeDevice]) -> None:
    """A kernel that Triton has not compiled takes seconds, in which other ranks would wait within a call."""

    def take(comm: Communicator) -> tuple[set[Any], set[Any]]:
        aggregator = start(comm, Marsit(None, global_step=0.1), N, "float32", True)
        before = set(made[comm.rank].forms)
        aggregator.aggregate(FakeArray(vector(comm.rank, 0, N), index=comm.rank))
        return before, made[comm.rank].forms

    for before, after in run_local(3, take, Ring(), piece_bytes=512):
        merging = {form for form in after if form[0] in ("_merge_words_kernel", "_draw_words_kernel")}
        assert merging
        assert merging <= before
