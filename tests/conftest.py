"""Set-up of all tests: the same examples in every run, Triton's interpreter without a GPU, and skips without extras.

Tests that need a package of an extra, such as PyTorch, are skipped where that is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Every run and every rank must draw the same examples: no randomness, no stored examples, no clocks.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# Triton reads it when it is imported: PyTorch may do that in any test, long before those of the kernels for GPUs.
if not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"

# Limits of tests hold as long as so many processes compete for a processor, as they do where two lanes run at one time.
PROCESSES_A_PROCESSOR = 5
# A machine of CI may become busy after it has been looked at: there a test may take so many times longer.
CI_FACTOR = 3

EXTRAS = ("matplotlib", "rich", "safetensors", "scipy", "sklearn", "torch", "triton")
MISSING = frozenset(name for name in EXTRAS if find_spec(name) is None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Lengthen the limits of tests on a busier machine, where the same work takes longer."""
    factor = os.getloadavg()[0] / (PROCESSES_A_PROCESSOR * len(os.sched_getaffinity(0)))
    if os.environ.get("CI"):
        factor = max(factor, CI_FACTOR)
    if factor > 1:
        usual = config.getoption("timeout", None) or config.getini("timeout")
        for item in items:
            mark = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(factor * float(mark.args[0] if mark else usual)), append=False)


def missing_extra(error: BaseException | None) -> str:
    """Return the package of an extra that an import lacked; empty where the error is another one."""
    while error is not None:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in MISSING:
            return name
        error = error.__cause__
    return ""


class Module(pytest.Module):
    """A file of tests, skipped where one of its imports needs an extra."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except self.CollectError as error:
            lacking = missing_extra(error)
            if not lacking:
                raise
            pytest.skip(f"{lacking} is not installed", allow_module_level=True)


if MISSING:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Module:
        return Module.from_parent(parent, path=module_path)

    def skipping() -> Generator[None, Any, Any]:
        """Make the error of a test's own import a skip, where it lacks an extra."""
        try:
            return (yield)
        except ImportError as error:
            lacking = missing_extra(error)
            if not lacking:
                raise
            pytest.skip(f"{lacking} is not installed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup() -> Generator[None, Any, Any]:
        return (yield from skipping())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call() -> Generator[None, Any, Any]:
        return (yield from skipping())
