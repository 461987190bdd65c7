"""A device of PyTorch's that is none: tensors on "fake:0", whose memory only their device reaches.

PyTorch computes at once, with the values in the host's memory. Copies by `collectives.arrays` are a `FakeDevice`'s:
late, and in its order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from collectives.arrays import MAKERS, Taken
from collectives.arrays.device_lookup import NAMES
from tests.fake_device import FakeDevice, order_of_test

NAME, KIND = "fake", 12  # DLPack's number of devices that it does not know


class _Backend:
    """What PyTorch asks of a kind of device. It is there while a test can reach it: other tests must not meet it."""

    available = False

    def is_available(self) -> bool:
        return self.available

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(self.available)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


_backend = _Backend()


class _Hook(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return _backend.available

    def has_primary_context(self, device_index: int) -> bool:
        return _backend.available

    def is_built(self) -> bool:
        return True


# Beside it PyTorch's backward no longer finds the streams of a GPU.
GPU_IN_ITS_PLACE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not GPU_IN_ITS_PLACE:
    _setup_privateuseone_for_python_backend(NAME, _backend, _Hook())


class FakeTensor(Tensor):
    """A tensor on the device; `there` has its values."""

    there: Tensor

    @staticmethod
    def __new__(cls, there: Tensor) -> FakeTensor:
        device = torch.device(NAME, 0)
        made: Any = Tensor._make_wrapper_subclass
        return made(cls, there.shape, there.stride(), there.storage_offset(), dtype=there.dtype, device=device)  # type: ignore[no-any-return]

    def __init__(self, there: Tensor) -> None:
        self.there = there

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, *args, **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{NAME} {self.there!r}"

    @property
    def data(self) -> Any:
        """See `Tensor`."""
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        self.there = other.there

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("the host cannot read a tensor of a device")

    def __dlpack_device__(self) -> Any:
        return KIND, 0

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry out an operation with the values; what lies on the device afterwards are its tensors again."""
    known = {id(one.there): one for one in tree_leaves((args, kwargs)) if isinstance(one, FakeTensor)}
    asked = kwargs.get("device")
    lands_there = bool(known) if asked is None else asked.type == NAME
    found = op(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))

    def back(value: Any) -> Any:
        if not lands_there or not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else FakeTensor(value)

    return tree_map(back, found)


def _on_host(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.there
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


_library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
_library.fallback(_run, "PrivateUse1")  # type: ignore[no-untyped-call]


class FakeTorchDevice(FakeDevice):
    """See `FakeDevice`."""

    def __init__(self) -> None:
        super().__init__(order=order_of_test())
        self.name = f"{NAME}:0"

    def take(self, array: Any) -> Taken:
        there = array.detach().there
        contiguous = there.is_contiguous()
        vector = there.view(-1) if contiguous else None
        dtype = str(there.dtype).removeprefix("torch.")
        return Taken(dtype, tuple(there.shape), contiguous, there.data_ptr(), vector)


@contextmanager
def gpu() -> Iterator[str]:
    """Give the name of a GPU, if there is one, else of this device, which can be reached meanwhile."""
    if GPU_IN_ITS_PLACE:
        yield "cuda"
        return
    with reachable():
        yield NAME


@contextmanager
def reachable() -> Iterator[FakeTorchDevice]:
    """Let `collectives.arrays` find the device; each rank, also where ranks are threads, has the same one."""
    if GPU_IN_ITS_PLACE:
        pytest.skip("kernels cannot read the fake device unless they are interpreted: TRITON_INTERPRET=1")
    device = FakeTorchDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAKERS, KIND, lambda index: device)
        patch.setitem(NAMES, NAME, KIND)
        patch.setattr(_backend, "available", True)
        yield device
