"""A GPU that does nothing: launches, copies and events are counted and empty, so that only the host works in a step.

Tensors on it are PyTorch's of device "meta", which have shapes and no memory. Calls of CUDA are empty, while those of
PyTorch, Triton and mpicomp that lead there are real: kernels are compiled for an H100, and Triton launches each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch._dynamo  # before its attributes of tensors are replaced; optimizers load it as well
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from collectives.arrays import MAKERS, TorchDevice
from collectives.arrays.device_lookup import NAMES

NAME, KIND = "meta", 13  # a number that DLPack does not use


class Stream:
    """Stand in for `torch.cuda.Stream`; records events."""

    counts: ClassVar[Counter[str]] = Counter()
    device_index = cuda_stream = stream_id = device_type = 0

    def __init__(self, device: int = 0) -> None:
        self.device = torch.device(NAME)

    def record_event(self, event: Any = None) -> Event:
        """Count an event."""
        self.counts["events"] += 1
        return event or Event()

    def wait_event(self, event: Event) -> None:
        """Count nothing: a wait of a stream."""

    def wait_stream(self, other: Stream) -> None:
        """Wait for an event of another stream, as PyTorch does."""
        self.wait_event(other.record_event())


class Event:
    """Stand in for `torch.cuda.Event`: it has happened."""

    def record(self, stream: Stream) -> None:
        """Count an event."""
        stream.record_event(self)

    def query(self) -> bool:
        """Return True."""
        return True


class Launcher:
    """Triton's launcher of a compiled kernel."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        """Count a launch."""
        Stream.counts["launches"] += 1


class Driver:
    """Triton's driver of an H100 that is not there."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        self.utils = self

    def get_current_device(self) -> int:
        """Return 0."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return 0."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the architecture of an H100."""
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Return the device of tensors."""
        return torch.device(NAME)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the shared memory of a program."""
        return {"max_shared_mem": 232448}

    def load_binary(self, *binary: object) -> tuple[int, ...]:
        """Return module, function, registers, spills and the most threads of a kernel."""
        return 1, 1, 32, 0, 1024


@contextmanager
def empty_gpu() -> Iterator[Counter[str]]:
    """Let `torch.device("meta")` be a GPU in this block; yields the counts of launches, copies and events."""
    counts = Stream.counts
    counts.clear()
    device, default = TorchDevice.__new__(TorchDevice), Stream()
    empty, from_dlpack = torch.empty, torch.utils.dlpack.from_dlpack
    kinds = torch.Tensor.__dlpack_device__
    exported = torch.zeros(1)

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        counts["copies"] += 1
        return target

    def fill(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        counts["fills"] += 1

    def launch(array: torch.Tensor, *arguments: object) -> torch.Tensor:
        counts["launches"] += 1
        return array

    def take(array: torch.Tensor) -> torch.Tensor:
        from_dlpack(exported)
        return array.detach()

    def pin(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **options) if pin_memory else empty(*shape, **options)

    def on_host(array: torch.Tensor) -> torch.Tensor:
        return torch.zeros(array.shape, dtype=array.dtype, device="cpu") if array.device.type == NAME else array

    def numbers(array: torch.Tensor) -> Any:
        return (KIND, 0) if array.device.type == NAME else kinds(array)

    stand_in: Any
    with ExitStack() as stack:
        for name, stand_in in {
            "Stream": Stream, "Event": lambda **_: Event(),
            "current_stream": lambda device=None: default, "is_current_stream_capturing": lambda: False,
            "set_device": lambda index: None, "current_device": lambda: 0, "nvtx.range_push": lambda name: 0,
            "nvtx.range_pop": lambda: 0,
        }.items():  # fmt: skip
            stack.enter_context(patch(f"torch.cuda.{name}", stand_in))
        # PyTorch's builds for CPUs lack them
        for name, stand_in in {
            "getCurrentRawStream": lambda index: 0, "getCurrentStream": lambda index: (0, 0, 0),
            "setStream": lambda *numbers, **named: None, "exchangeDevice": lambda index: 0,
            "maybeExchangeDevice": lambda index: 0,
        }.items():  # fmt: skip
            stack.enter_context(patch(f"torch._C._cuda_{name}", stand_in, create=True))
        for name, stand_in in {
            "_foreach_copy_": fill, "empty": pin, "from_dlpack": take, "Tensor.copy_": copy,
            "Tensor.index_fill_": launch, "Tensor.cpu": on_host, "Tensor.is_cuda": True, "Tensor.is_meta": False,
            "Tensor.__dlpack_device__": numbers,
        }.items():  # fmt: skip
            stack.enter_context(patch(f"torch.{name}", stand_in))
        TorchDevice.__init__(device, torch, 0)
        device.name = NAME
        stack.enter_context(patch.dict(MAKERS, {KIND: lambda index: device}))
        stack.enter_context(patch.dict(NAMES, {NAME: KIND}))
        driver.set_active(Driver())
        try:
            yield counts
        finally:
            driver._active = None
