"""A plugin of pytest that has launches of Triton's kernels compiled for a GPU that is not there, and not run.

Tests of the kernels say what they are launched with. Results are then garbage, and comparisons with the CPU's are
left out, so that a test goes on to its next launch; whether it passes says nothing. ``MPICOMP_COMPILE_FOR`` is "cuda"
or "hip". Of each kernel the first launch is compiled, and the first with other arguments left out;
``MPICOMP_COMPILE_ALL=1`` compiles every variant. ``MPICOMP_COMPILED`` is a file for what was done, in JSON: names of
kernels that were compiled, and of those that were not launched, and what failed. ``MPICOMP_RECORD_CEILINGS=1`` writes
the ceilings of `tests.unit.kernels.gpu.machine_code`.
"""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mpicomp.kernels import gpu
from tests.unit.kernels.gpu import machine_code, side_by_side

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
ALL = os.environ.get("MPICOMP_COMPILE_ALL") == "1"
_target = TARGETS[os.environ["MPICOMP_COMPILE_FOR"]]
_launch = JITFunction.run
_compiled: dict[str, int] = {}
_failed: dict[str, str] = {}
_counts: dict[str, dict[str, int]] = {}
_codes: dict[str, list[tuple[str, bytes]]] = {}
_forms: set[tuple[str, tuple[bool, ...]]] = set()
_short: dict[tuple[str, tuple[bool, ...]], tuple[Any, ...]] = {}


class AbsentGPU:
    """What Triton asks of a driver when it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def kernels() -> set[str]:
    """Names of the package's kernels, but for functions that kernels call: by convention those end in _kernel."""
    modules = [import_module(f"{gpu.__name__}.{one.name}") for one in iter_modules(gpu.__path__)]
    return {
        name_of(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn.__module__ == module.__name__
    }


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


# What rounds otherwise than the CPU does, what goes through memory of a thread, and atomics that order other accesses.
FAULTS = re.compile(
    r"\.ftz\b|\bfma\.\w+\.f\d+|\b(?:div|rcp|sqrt|rsqrt)\.(?:approx|full)[.\w]*|\b(?:ld|st)\.local[.\w]*"
    r"|\b(?:atom|red)\.global[.\w]*\.acq_rel[.\w]*"
)


def faults(ptx: str) -> list[str]:
    """Return instructions that kernels must not have."""
    return sorted(set(FAULTS.findall(ptx)))


def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Stand in for a launch."""
    name = name_of(kernel)
    form = name, tuple(argument is None for argument in arguments)  # what is None leaves branches out
    _compiled[name] = _compiled.get(name, 0) + 1
    if ALL or form not in _forms:
        # Triton folds a length of 1, and with it all accesses to more than one element: a longer launch may come.
        if not ALL and any(type(argument) is int and argument == 1 for argument in arguments):
            _short.setdefault(form, (kernel, arguments, grid, options))
            return
        _forms.add(form)
        compile_form(name, kernel, arguments, grid, options)


def compile_form(name: str, kernel: Any, arguments: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
    """Compile a kernel in one form, and note what is wrong with its code."""
    try:
        aligned = [_aligned(argument) for argument in arguments]
        compiled = _launch(kernel, *aligned, grid=grid, warmup=True, **options)
        found = [f"in PTX: {one}" for one in faults(compiled.asm.get("ptx", ""))]
        counts = machine_code.measure(compiled.asm["ptx"], compiled.asm["cubin"]) if "cubin" in compiled.asm else None
        if counts is not None:
            _codes.setdefault(name, []).append((compiled.asm["ptx"], compiled.asm["cubin"]))
            largest = _counts.setdefault(name, counts)
            # of the forms of a kernel the largest counts; variants beyond the first ones have no ceilings
            _counts[name] = {one: max(largest[one], counts[one]) for one in counts}
            found += machine_code.beyond("" if ALL else name, counts)
        if found:
            _failed.setdefault(name, f"{found}")
    except Exception as error:  # noqa: BLE001 - of whatever kind: tests must not hide it
        _failed.setdefault(name, f"{type(error).__name__}: {error}"[-2000:])


def _aligned(argument: Any) -> Any:
    """Return memory for a tensor at a multiple of 16 bytes, as memory of training loops is; nothing is read from it."""
    return torch.empty_like(argument) if isinstance(argument, torch.Tensor) else argument


def nothing(*_: Any, **__: Any) -> None:
    """Compare nothing."""


_known = kernels()  # made before `tests/conftest.py` asks for the interpreter, which tests then believe in
driver.set_active(AbsentGPU())
JITFunction.run = compile_only
side_by_side.assert_same = nothing
np.testing.assert_array_equal = nothing
os.environ["TRITON_INTERPRET"] = "1"


def pytest_sessionfinish() -> None:
    """Compile forms that were launched for one element alone, and write what was done."""
    for form, (kernel, arguments, grid, options) in _short.items():
        if form not in _forms:
            compile_form(form[0], kernel, arguments, grid, options)
    for name, codes in _codes.items():
        if not ALL and machine_code.lacks_wide(name, codes):
            _failed.setdefault(name, "no access of 16 bytes")
    if os.environ.get("MPICOMP_RECORD_CEILINGS") == "1":
        machine_code.record(_counts, _codes)
    found = {"compiled": sorted(_compiled), "left_out": sorted(_known - set(_compiled)), "failed": _failed}
    Path(os.environ["MPICOMP_COMPILED"]).write_text(json.dumps(found))
