"""Works and their futures, as `torch.distributed` returns them for calls in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import Work

from collectives import CollectiveTimeout
from collectives.annotations import override
from collectives.execution.handle import Handle
from collectives.execution.uncompiled import keep_methods_uncompiled
from mpicomp.torch.devices import devices_of

NO_TIMEOUT = timedelta(0)


@cache
def _callback_thread() -> ThreadPoolExecutor:
    """Return the thread of all callbacks: they run in the order in which calls end, which is the same on all ranks."""
    return ThreadPoolExecutor(1, "mpicomp callbacks")


def _submit(callback: Callable[[], None]) -> None:
    _callback_thread().submit(callback)


class _Failure:
    """Value of a failed call's future, which raises the error where tensors are extracted from it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def raise_it(self) -> NoReturn:
        raise self.error

    def __reduce_ex__(self, protocol: object) -> NoReturn:  # called by C++ to find tensors in the value
        self.raise_it()


class CallbackFuture(torch.futures.Future[Any]):
    """Future whose callbacks may wait for other calls, since they run in a thread of their own.

    `devices` are those of its tensors, without the CPU.
    """

    def __init__(self, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._devices = devices

    @override
    def then(self, callback: Callable[[CallbackFuture], Any]) -> CallbackFuture:
        child = CallbackFuture(devices=self._devices)
        gpus = [device for device in self._devices if torch.device(device).type == "cuda"]

        def run() -> None:
            try:
                with torch.cuda.device(gpus[0]) if gpus else nullcontext():  # where a callback may make tensors
                    # The future is done. The streams of this thread wait for it, and keep its memory.
                    with suppress(Exception):  # the callback gets the error
                        self.wait()
                    child.set_result(callback(self))
            except Exception as error:  # noqa: BLE001 - raised by the child
                child.set_exception(error)

        self.add_done_callback(lambda _: _submit(run))
        return child

    @override
    def set_exception(self, result: Any) -> None:
        # `wait`, `value`, and the reducer of DDP in `backward` raise the error.
        self._set_unwrap_func(lambda value: value.raise_it() if isinstance(value, _Failure) else None)
        self.set_result(_Failure(result))


@keep_methods_uncompiled
class MPIWork(Work):
    """One call in flight, or several that are waited for together; the future holds the output tensors."""

    def __init__(self, handles: Sequence[Handle], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.handles, self._tensors = handles, list(tensors)
        self._future: CallbackFuture | None = None

    @override
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        # After a timeout the call goes on.
        if timeout > NO_TIMEOUT and not self.ended_within(timeout.total_seconds()):
            raise CollectiveTimeout(f"Timed out: the call has not ended after {timeout.total_seconds():g} s")
        for handle in self.handles:
            handle.wait()
        return True

    def ended_within(self, seconds: float) -> bool:
        """Wait for the end, successful or not; False if it takes longer."""
        ended = threading.Event()
        self.when_ended(ended.set)
        return ended.wait(seconds)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Have the progress thread run a callback once all handles have ended."""
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
        try:
            ended = [handle.poll() for handle in self.handles]  # every handle notes that its end was seen
            return all(ended), None
        except Exception as error:  # noqa: BLE001 - returned
            return True, error

    @override
    def is_completed(self) -> bool:
        return self._poll()[0]

    @override
    def is_success(self) -> bool:
        return self._poll() == (True, None)

    @override
    def exception(self) -> BaseException | None:
        return self._poll()[1]

    @override
    def result(self) -> list[Tensor]:
        return self._tensors

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def source_rank(self) -> int:
        source: int = self.handles[-1].wait()
        return source

    _source_rank = source_rank

    @override
    def get_future(self) -> CallbackFuture:
        if self._future is None:
            self._future = CallbackFuture(devices=devices_of(self._tensors))
            self.when_ended(self._complete)
        return self._future

    def _complete(self) -> None:
        assert self._future is not None
        _, error = self._poll()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)
