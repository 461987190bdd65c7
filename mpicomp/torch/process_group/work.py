"""What `torch.distributed` gives its callers of a call in flight: a work, and its future."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import Work as TorchWork

from collectives import CollectiveTimeout
from collectives.compiling import keep_methods_uncompiled
from collectives.execution.handle import Handle
from mpicomp.torch.devices import devices_of

NO_TIMEOUT = timedelta(0)


@cache
def _callbacks() -> ThreadPoolExecutor:
    """The thread of all callbacks: one by one, in the order in which calls end, which is the same on all ranks."""
    return ThreadPoolExecutor(1, "mpicomp callbacks")


def _submit(callback: Callable[[], None]) -> None:
    _callbacks().submit(callback)


def _current(devices: Sequence[Any]) -> AbstractContextManager[object]:
    """Where a callback makes tensors on a GPU, if it does not say on which."""
    gpus = [device for device in devices if torch.device(device).type == "cuda"]
    return torch.cuda.device(gpus[0]) if gpus else nullcontext()


class _Failure:
    """What the future of a failed call holds: whoever wants tensors of it gets the error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def raise_it(self) -> NoReturn:
        raise self.error

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # how C++ looks for tensors in it
        self.raise_it()


class Future(torch.futures.Future[Any]):
    """A future whose callbacks may wait for other calls: they run in a thread of their own.

    Parameters
    ----------
    devices : list of torch.device
        Of the tensors that it will hold, the CPU left out.
    """

    def __init__(self, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._devices = devices

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Call `callback` with this future once it is done; the future returned holds what it returns or raises."""
        child = Future(devices=self._devices)

        def run() -> None:
            try:
                with _current(self._devices):
                    with suppress(Exception):  # which the callback gets
                        self.wait()  # it is done; lets the streams of this thread wait, and keeps memory for them
                    child.set_result(callback(self))
            except Exception as error:  # noqa: BLE001 - raised by the child
                child.set_exception(error)

        self.add_done_callback(lambda _: _submit(run))
        return child

    def set_exception(self, result: Any) -> None:
        """End it by an error, which `wait` and `value` raise, and which the reducer of DDP raises in `backward`."""
        self._set_unwrap_func(lambda value: value.raise_it() if isinstance(value, _Failure) else None)
        self.set_result(_Failure(result))


_Base: Any = TorchWork


@keep_methods_uncompiled
class Work(_Base):  # type: ignore[misc]
    """A call in flight.

    Parameters
    ----------
    handles : sequence of Handle
        Of one call, or of several that a caller waits for together.
    result : sequence of Tensor
        What the future holds.

    Attributes
    ----------
    handles : sequence of Handle
    """

    def __init__(self, handles: Sequence[Handle], result: Sequence[Tensor]) -> None:
        super().__init__()
        self.handles, self._tensors = handles, list(result)
        self._future: Future | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the end, at most for `timeout` if it is more than nothing.

        Raises
        ------
        CollectiveError
            What the call ended by.
        CollectiveTimeout
            It has not ended in time, and goes on.
        """
        if timeout > NO_TIMEOUT and not self.ended_within(timeout.total_seconds()):
            raise CollectiveTimeout(f"Timed out: the call has not ended after {timeout.total_seconds():g} s")
        for handle in self.handles:
            handle.wait()
        return True

    def ended_within(self, seconds: float) -> bool:
        """Whether it ends so soon, well or not."""
        ended = threading.Event()
        self.when_ended(ended.set)
        return ended.wait(seconds)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have the progress thread call this once all handles have ended."""
        if not self.handles:
            callback()
            return
        left = list(self.handles)

        def ended(_: Handle) -> None:
            left.pop()
            if not left:
                callback()

        for handle in self.handles:
            handle.then(ended)

    def _poll(self) -> tuple[bool, BaseException | None]:
        """Whether it has ended, and by which error."""
        try:
            ended = [handle.poll() for handle in self.handles]  # each hears of its end
            return all(ended), None
        except Exception as error:  # noqa: BLE001 - returned
            return True, error

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._poll()[0]

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._poll() == (True, None)

    def exception(self) -> BaseException | None:
        """What it ended by."""
        return self._poll()[1]

    def result(self) -> list[Tensor]:
        """The tensors that were written to."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent what a receive from any source got."""
        source: int = self.handles[-1].wait()
        return source

    _source_rank = source_rank

    def get_future(self) -> Future:
        """A future that holds the result."""
        if self._future is None:
            self._future = Future(devices=devices_of(self._tensors))
            self.when_ended(self._complete)
        return self._future

    def _complete(self) -> None:
        assert self._future is not None
        _, error = self._poll()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)
