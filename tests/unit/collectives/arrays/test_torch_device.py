"""`TorchDevice`: streams, current GPUs of threads, captured graphs, and memory of copies under way."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from collectives.arrays import Queued, TorchDevice, require_stream, torch_device, torch_events, wait
from tests.fake_streams import INDEX, Stream, StreamsDevice


def in_thread(work: Callable[[], object]) -> None:
    """Do something in a thread that has chosen no GPU, and raise what it raises."""
    raised: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


PROJECT = Path(__file__).resolve().parents[4]


@pytest.fixture(params=["private", "contexts"])
def device(request: pytest.FixtureRequest) -> StreamsDevice:
    """Return a device where PyTorch has the functions of C that its contexts call, or lacks them."""
    return StreamsDevice(has_private=request.param == "private")


CALLS: dict[str, Callable[[StreamsDevice], object]] = {
    "run": lambda device: device.run(print),
    "pinned": lambda device: device.pinned(8),
    "take": lambda device: device.take(torch.ones(2)),
    "copy to the host": lambda device: wait(device.copy(device.zeros(2, "float32"), np.zeros(2, np.float32))),
    "copy to the device": lambda device: wait(device.copy(np.zeros(2, np.float32), device.zeros(2, "float32"))),
    "done": lambda device: wait(device.done()),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_call_touches_another_gpu_or_changes_the_current_one(device: StreamsDevice, name: str) -> None:
    def call() -> None:
        CALLS[name](device)
        assert device.torch.current_device() == 0

    in_thread(call)
    assert device.torch.contexts <= {INDEX}


def test_a_thread_that_uses_the_device_has_it_current_and_others_do_not(device: StreamsDevice) -> None:
    def use() -> None:
        device.use()
        assert device.torch.current_device() == INDEX

    in_thread(use)
    assert device.torch.current_device() == 0
    assert device.torch.contexts == {INDEX}


def test_a_thread_that_uses_the_device_is_exempt_from_captures_of_others(
    device: StreamsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    relaxed: list[Any] = []
    monkeypatch.setattr("collectives.arrays.torch_device.relax_capture", lambda hip: relaxed.append(hip))
    device.use()
    device.use()
    in_thread(device.use)
    assert relaxed == [False, False]


def test_an_array_is_refused_while_a_graph_is_captured(device: StreamsDevice) -> None:
    device.torch.is_capturing = True
    with pytest.raises(ValueError, match=r"CUDA graph is being captured on cuda:1.*outside of the capture"):
        device.take(torch.ones(2))
    assert not device._stream.work


def test_a_dtensor_is_refused(device: StreamsDevice) -> None:
    with pytest.raises(TypeError, match=r"DTensor, of which this rank holds a part only: pass array.to_local\(\)"):
        device.take(type("DTensor", (), {})())


def test_the_device_waits_for_the_stream_that_makes_an_array(device: StreamsDevice) -> None:
    """PyTorch itself lets the current stream wait for the current stream."""
    made: list[int] = []
    with device.torch.device(INDEX):
        device.torch.launch(lambda: made.append(1))
    taken = device.take(torch.ones(2, 3))
    assert not made
    wait(device.done())
    assert made == [1]
    assert (taken.dtype, taken.shape, taken.vector.tolist()) == ("float32", (2, 3), [1.0] * 6)


def test_kernels_of_two_threads_are_launched_one_after_the_other() -> None:
    """Triton loads a kernel at its first launch, and not for two threads at once."""
    device, now, most = StreamsDevice(), [0], [0]

    def launch() -> None:
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.05)
        now[0] -= 1

    threads = [threading.Thread(target=TorchDevice.run, args=(device, launch)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_profiles_show_the_work_by_its_name(device: StreamsDevice) -> None:
    def _encode() -> None:
        pass

    TorchDevice.run(device, _encode)
    assert device.torch.ranges == ["mpicomp encode"]
    assert device.torch.depth == 0


def test_gpu_stream_and_range_are_left_where_work_fails(device: StreamsDevice) -> None:
    def fail() -> None:
        assert device.torch.current_device() == INDEX
        assert device.torch.current_stream(INDEX) is device._stream
        device._call_on(device._to_host, inner)
        assert device.torch.current_stream(INDEX) is device._stream
        raise ZeroDivisionError

    def inner() -> None:
        assert device.torch.current_stream(INDEX) is device._to_host

    before = device.torch.current_stream(INDEX)
    with pytest.raises(ZeroDivisionError):
        TorchDevice.run(device, fail)
    assert (device.torch.current_device(), device.torch.depth) == (0, 0)
    assert device.torch.current_stream(INDEX) is before


def test_work_on_devices_has_names() -> None:
    """A lambda would be shown in profiles as such."""
    unnamed = re.compile(r"\b(?:run|launch)\(\s*lambda")
    files = [file for folder in ("collectives", "mpicomp") for file in (PROJECT / folder).rglob("*.py")]
    assert files
    found = [str(file) for file in files if unnamed.search(file.read_text().replace(">>> host.run(lambda", ""))]
    assert not found


def test_memory_of_a_copy_lives_until_it_is_done_though_its_event_is_dropped(device: StreamsDevice) -> None:
    """PyTorch and its pinned memory would hand it out again before."""
    vector, landed = device.zeros(2, "float32"), np.zeros(2, np.float32)
    alive = weakref.ref(vector.values)
    device.copy(vector, landed)
    del vector
    gc.collect()
    assert alive() is not None
    wait(device.copy(device.zeros(2, "float32"), landed))
    gc.collect()
    assert alive() is None


def test_a_stream_waits_for_kernels_and_copies_to_the_device_in_the_host_s_place(device: StreamsDevice) -> None:
    done, there = list[str](), device.zeros(2, "float32")

    def kernel() -> None:
        done.append("kernel")

    device.run(kernel)
    device.copy(np.ones(2, np.float32), there)
    stream = device.torch.Stream(0)  # of another GPU
    device.done().block(stream)
    assert (done, there.values.tolist()) == ([], [0, 0])
    stream.go_on(1)
    assert (done, there.values.tolist()) == (["kernel"], [1, 1])
    assert device.torch.contexts <= {INDEX}


def test_a_stream_waits_for_one_copy_to_the_device(device: StreamsDevice) -> None:
    there, stream = device.zeros(2, "float32"), device.torch.Stream(INDEX)
    device.copy(np.ones(2, np.float32), there).block(stream)
    assert not there.values.any()
    stream.go_on(1)
    assert there.values.all()


def test_no_stream_waits_for_a_copy_to_the_host(device: StreamsDevice) -> None:
    """The host alone can use it."""
    assert not isinstance(device.copy(device.zeros(2, "float32"), np.zeros(2, np.float32)), Queued)


def test_a_stream_that_captures_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        wait_event = print

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        with pytest.raises(ValueError, match="stream captures a CUDA graph") if captures else nullcontext():
            require_stream(Stream())


def events_of(device: StreamsDevice, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many events are recorded in `work`."""
    recorded: list[Stream] = []
    record = Stream.record_event
    monkeypatch.setattr(Stream, "record_event", lambda stream: (recorded.append(stream), record(stream))[1])
    work()
    return len(recorded)


def test_a_piece_takes_one_event_each_way_and_one_behind_the_stream_that_makes_its_vector(
    device: StreamsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = device.zeros(2, "float32"), np.zeros(2, np.float32)

    def piece() -> None:
        device.follow()
        device.copy(here, there)  # scales
        device.run(print)
        wait(device.copy(there, here))
        device.copy(here, there)
        device.run(print)
        decoded = device.done()
        assert device.done() is decoded
        decoded.block(device.torch.Stream(INDEX))
        wait(decoded)

    assert events_of(device, piece, monkeypatch) == 3


def test_an_event_behind_kernels_is_not_one_behind_later_ones(device: StreamsDevice) -> None:
    done: list[int] = []

    def later() -> None:
        done.append(1)

    wait(device.done())
    device.run(later)
    assert not done
    wait(device.done())
    assert done
    with device.torch.device(INDEX):
        device.torch.launch(later)
    device.follow()
    wait(device.done())
    assert done == [1, 1]


def test_a_long_copy_waits_for_the_writer_of_memory_that_is_followed_later(
    device: StreamsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "SHORT_BYTES", 7)
    (first, second), here = (device.zeros(2, "float32") for _ in range(2)), np.zeros(2, np.float32)
    device.follow()
    device.copy(first, np.zeros(2, np.float32))
    with device.torch.device(INDEX):
        device.torch.launch(lambda: second.values.fill(5))
    device.follow()
    wait(device.copy(second, here))
    assert here.tolist() == [5, 5]


def test_a_long_copy_has_a_stream_of_its_own_and_short_ones_to_the_host_follow_it(
    device: StreamsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = device.zeros(2, "float32"), np.zeros(2, np.float32)
    for copy, stream in ((there, here), device._to_host), ((here, there), device._to_device):
        device.copy(*copy)
        assert not stream.work
        with monkeypatch.context() as patch:
            patch.setattr(torch_device, "SHORT_BYTES", 7)
            device.copy(*copy)
        assert stream.work
    device._apart = torch_events.Event(lambda: False)
    before = len(device._to_host.work)
    device.copy(there, here)
    assert len(device._to_host.work) > before


def test_memory_of_a_copy_among_kernels_lives_until_they_are_done(device: StreamsDevice) -> None:
    for count in (1, torch_device.MOST_UNMARKED + 2):
        there = device.zeros(2, "float32")
        alive = weakref.ref(there.values)
        for _ in range(count):
            device.copy(np.ones(2, np.float32), there)
        del there
        gc.collect()
        assert alive() is not None
        wait(device.done())
        wait(device.copy(device.zeros(2, "float32"), np.zeros(2, np.float32)))
        gc.collect()
        assert alive() is None


def test_the_current_stream_is_not_entered_to_see_whether_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device_index, cuda_stream, wait_event = 1, 7, print

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or nullcontext())
    entered: list[Any] = []
    for index, address, enters in (1, 7, False), (1, 8, True), (0, 7, True):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index, address=address: address, raising=False
        )
        require_stream(Stream())
        assert bool(entered) == enters
        entered.clear()
