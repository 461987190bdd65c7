"""What `TorchDevice` asks of PyTorch, where streams are lists of work that is done when its end has been asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import TorchDevice


class Stream:
    """See `torch.cuda.Stream`."""

    def __init__(self, index: int = 0) -> None:
        self.work: list[Callable[[], object]] = []
        self._done = 0

    def record_event(self) -> Event:
        return Event(self, len(self.work))

    def wait_event(self, event: Event) -> None:
        self.work.append(event.query)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def go_on(self, count: int) -> None:
        """Do so much of the work, and on other streams what it waits for; nothing else."""
        while self._done < count:
            self._done += 1
            self.work[self._done - 1]()


class Event:
    """See `torch.cuda.Event`."""

    def __init__(self, stream: Stream, count: int) -> None:
        self._stream, self._count = stream, count

    def query(self) -> bool:
        self._stream.go_on(self._count)
        return True


class Vector:
    """A tensor on the device, or one on the host's memory; `values` are for the test."""

    def __init__(self, torch: FakeTorch, values: NDArray[Any]) -> None:
        self._torch, self.values = torch, values

    def view(self, dtype: Any) -> Vector:
        return Vector(self._torch, self.values.view(dtype))

    def copy_(self, source: Vector, non_blocking: bool) -> None:
        assert non_blocking
        self._torch.launch(lambda: np.copyto(self.values, source.values))


class FakeTorch:
    """See `torch`, and its module `cuda`."""

    uint8, Stream = np.uint8, Stream

    def __init__(self) -> None:
        self.cuda = self
        self._current = self._default = Stream()

    def launch(self, work: Callable[[], object]) -> None:
        """Have the current stream do something."""
        self._current.work.append(work)

    def current_stream(self, index: int) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def from_numpy(self, array: NDArray[Any]) -> Vector:
        return Vector(self, array)


class StreamsDevice(TorchDevice):
    """A `TorchDevice` on such streams."""

    def __init__(self) -> None:
        super().__init__(FakeTorch(), 0)

    def zeros(self, n: int, dtype: str) -> Any:
        return Vector(self._torch, np.zeros(n, dtype))

    def run(self, work: Callable[[], object]) -> None:
        super().run(lambda: self._torch.launch(work))
