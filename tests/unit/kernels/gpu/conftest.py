"""The device of the kernels for GPUs: a GPU, or where there is none the CPU, with Triton's interpreter.

Tests load `mpicomp.kernels.gpu` when they run: where Triton or PyTorch is missing, they are skipped.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.fake_device import FakeDevice

MISSING = [name for name in ("torch", "triton") if find_spec(name) is None]
SIGNED = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # The interpreter computes with NumPy, which warns of NaN and of overflow where a GPU does not.
            item.add_marker(pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"))
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(MISSING)}"))


@pytest.fixture(scope="session")
def device() -> str:
    """Give the kind of device that the kernels' tensors are on; `tests/conftest.py` looks for a GPU."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, device: str, request: pytest.FixtureRequest) -> dict[int, FakeDevice]:
    """Give the fake devices, which are made when they are asked for; a GPU takes their place where it can.

    Tests with this fixture as an argument look at what a fake device has done, or use its arrays.
    """
    from tests.fake_device import fake_devices

    if device == "cuda":
        if "made" in inspect.signature(request.function).parameters:
            pytest.skip("needs the fake device: TRITON_INTERPRET=1")
        return {}
    return fake_devices(monkeypatch)


@pytest.fixture(scope="session")
def to_device(device: str) -> Callable[..., Any]:
    """Give what copies an array to the device, `offset` elements off any alignment, unsigned numbers as signed ones."""
    import torch

    def copy(array: NDArray[Any], offset: int = 1) -> Any:
        flat = np.ascontiguousarray(array).reshape(-1)
        source = torch.from_numpy(flat.view(SIGNED.get(flat.dtype, flat.dtype)))
        tensor = torch.empty(source.numel() + offset, dtype=source.dtype, device=device)[offset:]
        return tensor.copy_(source).view(array.shape)

    return copy


@pytest.fixture(scope="session")
def to_host() -> Callable[[Any], NDArray[Any]]:
    """Give what copies a tensor to an array."""

    def copy(tensor: Any) -> NDArray[Any]:
        array: NDArray[Any] = tensor.cpu().numpy()
        return array.copy()

    return copy
