"""Launches that are repeated: Triton examines the arguments once for each of their forms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from mpicomp.kernels.gpu import common
from mpicomp.kernels.gpu.common import launch


class Kernel:
    """Stand in for a kernel of Triton, which returns the compiled one, or None under the interpreter."""

    def __init__(self, is_interpreted: bool = False) -> None:
        self.examined, self.launched = list[Any](), list[Any]()
        self._is_interpreted = is_interpreted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def examine(*arguments: Any, **options: Any) -> Any:
            self.examined.append((grid, arguments, options))
            return None if self._is_interpreted else Compiled(self)

        return examine


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream: self._kernel.launched.append((grid, arguments, stream))


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each device have a current stream, as in PyTorch's builds for GPUs; vectors on the CPU are on device -1."""
    numbers = count(10)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: index + next(numbers), raising=False)


def test_arguments_of_one_form_are_examined_once_and_passed_each_time() -> None:
    kernel, vectors = Kernel(), torch.zeros(4, 64)
    for vector in vectors:
        launch(kernel, 5, vector, None, 3, True, num_warps=1)
    [(grid, found, options)] = kernel.examined
    assert (grid, found[1:], options) == ((5,), (None, 3, True), {"num_warps": 1})
    assert found[0].data_ptr() == vectors[0].data_ptr()
    assert [(grid, stream) for grid, _, stream in kernel.launched] == [((5, 1, 1), 9), ((5, 1, 1), 10), ((5, 1, 1), 11)]
    assert [found[0].data_ptr() for _, found, _ in kernel.launched] == [one.data_ptr() for one in vectors[1:]]


@pytest.mark.parametrize(
    "other",
    [(torch.zeros(8, dtype=torch.float64), 3), (torch.zeros(9)[1:], 3), (torch.zeros(8), 4), (None, 3)],
    ids=str,
)
def test_another_form_is_examined_again(other: tuple[Any, ...]) -> None:
    kernel, first = Kernel(), torch.zeros(8)
    for arguments in ((first, 3), other, (first, 3), other):
        launch(kernel, 1, first, *arguments)
    assert len(kernel.examined) == len(kernel.launched) == 2


def test_another_number_of_programs_has_a_grid_of_its_own() -> None:
    kernel, vector = Kernel(), torch.zeros(8)
    for programs in (2, (2, 3), 2, (2, 3)):
        launch(kernel, programs, vector)
    assert [grid for grid, _, _ in kernel.examined] == [(2,), (2, 3)]
    assert [grid for grid, _, _ in kernel.launched] == [(2, 1, 1), (2, 3, 1)]


def test_kernels_that_are_interpreted_are_launched_as_they_are() -> None:
    kernel = Kernel(is_interpreted=True)
    for _ in range(2):
        launch(kernel, 1, torch.zeros(1))
    assert len(kernel.examined) == 2


def test_forms_are_forgotten_once_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_launched", {})
    monkeypatch.setattr(common, "MOST_FORMS", 2)
    kernel, vector = Kernel(), torch.zeros(1)
    for number in (0, 1, 2, 0):
        launch(kernel, 1, vector, number)
    assert len(kernel.examined) == 4
    assert len(common._launched) == 2


def test_other_options_are_examined_again() -> None:
    kernel, vector = Kernel(), torch.zeros(8)
    for warps in (1, 2, 1):
        launch(kernel, 1, vector, num_warps=warps)
    assert (len(kernel.examined), len(kernel.launched)) == (2, 1)
