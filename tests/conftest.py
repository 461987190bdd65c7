"""Set-up of all tests: the same examples in every run, Triton's interpreter without a GPU, and skips without extras.

Tests that need a package of an extra, such as PyTorch, are skipped where that is not installed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
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

WORTH_RECORDING_S = 100.0  # of tests: shorter runs are of a few files, and leave the record as it is
EXTRAS = ("matplotlib", "rich", "safetensors", "scipy", "sklearn", "torch", "triton")
MISSING = frozenset(name for name in EXTRAS if find_spec(name) is None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-cases",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="run the first case alone of each test in this folder",
    )


def first_cases(items: list[pytest.Item], folders: list[Path]) -> list[pytest.Item]:
    """Leave out all but the first case of each test in some folders."""
    seen, kept = set[tuple[Path, str]](), list[pytest.Item]()
    for item in items:
        function = (item.path, getattr(item, "originalname", item.name))
        if function not in seen or not any(item.path.is_relative_to(folder) for folder in folders):
            kept.append(item)
        seen.add(function)
    return kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose, and lengthen the limits of tests on a busier machine, where the same work takes longer."""
    if folders := config.getoption("--first-cases"):
        kept = first_cases(items, [config.invocation_params.dir / folder for folder in folders])
        config.hook.pytest_deselected(items=[*({*items} - {*kept})])
        items[:] = kept
    factor = os.getloadavg()[0] / (PROCESSES_A_PROCESSOR * len(os.sched_getaffinity(0)))
    if os.environ.get("CI"):
        factor = max(factor, CI_FACTOR)
    if factor > 1:
        usual = config.getoption("timeout", None) or config.getini("timeout")
        for item in items:
            mark = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(factor * float(mark.args[0] if mark else usual)), append=False)


class Durations:
    """Adds up the seconds of each file's tests, and writes them to build/durations, a file for each kind of run.

    Only the process that reports does so: of several workers their controller, of several ranks the first.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run, self._seconds = folder, run, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        if sum(self._seconds.values()) > WORTH_RECORDING_S:
            self._folder.mkdir(parents=True, exist_ok=True)
            slowest = {file: round(seconds, 1) for file, seconds in self._seconds.most_common()}
            kind = Path(next(iter(slowest))).parts[1:2]  # of tests: unit, mpi or system
            path = self._folder / f"{'-'.join([*kind, self._run])}.json"
            path.write_text(json.dumps(slowest, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    rank, size = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}", 0)) for name in ("RANK", "SIZE"))
    if not hasattr(config, "workerinput") and rank == 0:
        run = f"{size}-ranks" if size else "serial"
        config.pluginmanager.register(Durations(config.rootpath / "build" / "durations", run))


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
