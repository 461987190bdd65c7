"""Results on a device are handed to a stream: the host waits for messages alone, and the bits are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient, Ring
from collectives.arrays.gpu_mpi import verdict
from collectives.arrays.gpu_mpi.verdict import Outcome
from collectives.dense import device_sum
from collectives.threads.run_local import run_local
from mpicomp import Dense, LocalTopK, Marsit, RandomK, ScaleCom
from tests.fake_device import FakeArray, FakeDevice, FakeStream, KernelEvent
from tests.unit.kernels.gpu.on_device import bits, start, vector

pytestmark = pytest.mark.usefixtures("made")

N = 1500
METHODS = {
    "marsit": (Marsit(full_precision_every=3), "float32"),
    "marsit paper": (Marsit(full_precision_every=None, residual="paper", transactional=True), "bfloat16"),
    "marsit skip": (Marsit(full_precision_every=None, nonfinite="skip"), "float16"),
    "marsit winners": (Marsit(full_precision_every=None, winners=2), "float32"),
    "scalecom": (ScaleCom(rate=4), "float32"),
    "random-k": (RandomK(rate=4), "float32"),
    "local top-k": (LocalTopK(rate=4), "float32"),
    "dense": (Dense(), "float32"),
    "dense by halves": (Dense(wire="bfloat16"), "float32"),
}


def steps(comm: Communicator, method: Any, dtype: str, streams: bool, background: bool = False) -> list[Any]:
    """Return the results of some steps, of which the consumer's stream reads each, and the last state."""
    aggregator, results = start(comm, method, N, dtype, True), list[Any]()
    out = FakeArray(np.zeros(N, vector(0, 0, 1, dtype).dtype), dtype, comm.rank)
    for step in range(5):
        stream = FakeStream() if streams else None
        x = FakeArray(vector(comm.rank, step, N, dtype), dtype, comm.rank)
        if background:
            assert aggregator.begin(x, out).wait(stream) is out
        else:
            assert aggregator.aggregate(x, out, stream) is out
        if stream is not None:
            if step == 2:
                aggregator.state_dict()  # while the device may still work, as it may where nothing is kept
            if step != 3:  # the next step begins while the device may still work
                stream.reach()
        if step != 3:
            results.append(bits(out))
    state = aggregator.state_dict()
    return [*results, *(np.asarray(state[key]) for key in sorted(state) if key != "method")]


# One method of each reducer.
IN_PIECES = ("marsit", "marsit paper", "marsit winners", "scalecom", "local top-k", "dense")


@pytest.mark.parametrize(
    ("name", "pieces"), [*((name, False) for name in METHODS), *((name, True) for name in IN_PIECES)]
)
def test_bits_are_those_of_a_host_that_waits(name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        for module in ("sign_merge", "shared_selection", "piece_lengths", "choosers", "all_gather", "shared_indices"):
            monkeypatch.setattr(f"mpicomp.reducers.{module}.BRIEF_ELEMENTS", 0)
    method, dtype = METHODS[name]
    options: dict[str, Any] = {"piece_bytes": 512 if pieces else None}
    waited = run_local(2, lambda comm: steps(comm, method, dtype, False), Ring(), **options)
    handed = run_local(2, lambda comm: steps(comm, method, dtype, True, comm.rank == 1), Ring(), **options)
    for one, expected in zip(handed, waited, strict=True):
        for mine, other in zip(one, expected, strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("pieces", [False, True], ids=["at once", "in pieces"])
def test_the_call_ends_before_the_device_has_written_the_result(
    pieces: bool, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr("mpicomp.reducers.sign_merge.BRIEF_ELEMENTS", 0)
    made.update({rank: FakeDevice(rank, "late") for rank in range(2)})

    def take(comm: Communicator) -> None:
        aggregator = start(comm, Marsit(full_precision_every=None), N, "float32", True)
        x, out = FakeArray(vector(comm.rank, 0, N), index=comm.rank), np.full(N, np.nan, np.float32)
        stream = FakeStream()
        aggregator.aggregate(x, FakeArray(out, index=comm.rank), stream)
        assert np.isnan(out).any()
        stream.reach()
        assert not np.isnan(out).any()

    run_local(2, take, Ring(), piece_bytes=64 if pieces else None)


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_dense_sums_and_copies_to_a_device_are_handed_over(
    direct: bool, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "carries", lambda comm: direct)
    monkeypatch.setattr(verdict.verdict, "outcome", Outcome(direct, "was faked"))
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 0)
    monkeypatch.setattr(device_sum, "DIRECT_BYTES", 0)

    def take(comm: Communicator) -> list[Any]:
        x, found = vector(comm.rank, 0, N), []
        for source in (FakeArray(x, index=comm.rank), x):
            out = FakeArray(np.full(N, np.nan, np.float32), index=comm.rank)
            stream, other = FakeStream(), FakeStream()
            handle = comm.iallreduce(source, "mean", out)
            assert handle.wait(stream) is out
            assert handle.wait(other) is out
            (stream if comm.rank else other).reach()  # either stream waits for the result
            found.append(out.there)
        return found

    for found in run_local(2, take, Ring(), piece_bytes=256):
        for one in found:
            np.testing.assert_array_equal(one, (vector(0, 0, N) + vector(1, 0, N)) / np.float32(2))


def test_the_host_may_wait_after_a_stream(made: dict[int, FakeDevice]) -> None:
    made[0] = FakeDevice(0, "late")
    out = np.full(N, np.nan, np.float32)
    with Communicator() as comm:
        handle = start(comm, Marsit(full_precision_every=None), N, "float32", True).begin(
            FakeArray(vector(0, 0, N)), FakeArray(out)
        )
        handle.wait(FakeStream())
        assert np.isnan(out).any()
        handle.wait()
    assert not np.isnan(out).any()


def test_errors_that_ranks_report_are_raised_before_the_call_ends() -> None:
    method = Marsit(full_precision_every=None, transactional=True)

    def take(comm: Communicator) -> list[Any]:
        aggregator, found = start(comm, method, N, "float32", True), list[Any]()
        for step in range(3):
            x = vector(comm.rank, step, N)
            x[5] = np.nan if (step, comm.rank) == (1, 1) else x[5]
            stream = FakeStream()
            if step == 1:
                with pytest.raises(NonFiniteGradient, match="from rank 1;"):
                    aggregator.aggregate(FakeArray(x, index=comm.rank), stream=stream)
                continue
            result = aggregator.aggregate(FakeArray(x, index=comm.rank), stream=stream)
            stream.reach()
            found.append(bits(result))
        return found

    def without(comm: Communicator) -> list[Any]:
        aggregator = start(comm, method, N, "float32", True)
        return [bits(aggregator.aggregate(FakeArray(vector(comm.rank, step, N), index=comm.rank))) for step in (0, 2)]

    handed, waited = run_local(2, take, Ring()), run_local(2, without, Ring())
    # the step that failed took no number, so that both make the same second step
    np.testing.assert_array_equal(handed, waited)


def test_a_step_after_a_stream_can_be_taken_back() -> None:
    method = Marsit(full_precision_every=None, residual="paper", transactional=True)
    with Communicator() as comm:
        aggregator = start(comm, method, N, "float32", True)
        aggregator.aggregate(FakeArray(vector(0, 0, N)))
        before = aggregator.state_dict()["residual"]
        aggregator.aggregate(FakeArray(vector(0, 1, N)), stream=FakeStream())
        aggregator.undo()
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], before)


def test_the_next_step_waits_before_messages_may_overwrite_memory_that_copies_read(
    made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    made[0], is_stuck = FakeDevice(0, "late"), [True]
    test = KernelEvent.Test
    with Communicator() as comm:
        aggregator = start(comm, Marsit(full_precision_every=None), N, "float32", True)
        aggregator.aggregate(FakeArray(vector(0, 0, N)), stream=FakeStream())
        monkeypatch.setattr(KernelEvent, "Test", lambda event: not is_stuck[0] and test(event))
        launched = made[0]._launched
        handle = aggregator.begin(FakeArray(vector(0, 1, N)))
        assert not any(handle.poll() for _ in range(50))
        assert made[0]._launched == launched
        is_stuck[0] = False
        handle.wait()


def test_something_else_than_a_stream_is_refused_on_all_ranks_and_the_call_goes_on() -> None:
    wrong = "stream is 'cuda': pass a stream of PyTorch, such as torch.cuda.current_stream()"

    def take(comm: Communicator) -> None:
        aggregator, x = start(comm, Marsit(), N, "float32", True), FakeArray(vector(0, 0, N), index=comm.rank)
        error = TypeError if comm.rank else CollectiveMismatch
        with pytest.raises(error, match=f"rank 1.*{wrong[:30]}"):
            aggregator.aggregate(x, stream="cuda" if comm.rank else FakeStream())
        handle = aggregator.begin(x)
        with pytest.raises(TypeError) as raised:
            handle.wait("cuda")
        assert str(raised.value).startswith(wrong)
        np.testing.assert_array_equal(handle.wait().there, x.there)

    run_local(2, take)


def test_results_in_memory_of_the_host_leave_the_stream_alone(comm: Communicator) -> None:
    stream = FakeStream()
    np.testing.assert_array_equal(comm.iallreduce(np.ones(3)).wait(stream), np.ones(3))
    aggregator = Marsit().start(comm, 3)
    np.testing.assert_array_equal(aggregator.aggregate(np.ones(3, np.float32), stream=stream), np.ones(3))
    assert not stream.waits
