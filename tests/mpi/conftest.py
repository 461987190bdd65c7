"""Multi-rank tests: ``mpirun -n N python -m pytest --with-mpi tests/mpi``, or ``python tests/run_lanes.py``.

A test runs on every rank. It takes ``mpi_comm``, a fresh communicator of all ranks, or with
``@pytest.mark.parametrize("mpi_comm", [5, 7], indirect=True)`` of the first 5 and then 7; or it takes ``comm``, a
`Communicator` of these. ``@pytest.mark.mpi(min_size=..., max_size=...)`` limits its lanes: elsewhere it is not
collected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from collectives import Communicator
from tests.mpi.lanes import TIMEOUT_S, delay_messages
from tests.run_lanes import HOME_LANES, lanes_of, may_have_tests

if TYPE_CHECKING:
    from mpi4py import MPI

    from tests.harness.plugin import RankAgreement

# A test that deadlocks ends in seconds, for every communicator without a limit of its own.
os.environ["MPICOMP_ARRIVAL_TIMEOUT"] = str(TIMEOUT_S)

PLUGIN = "rank_agreement"
MARKER_KEYWORDS = ("min_size", "max_size")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi") and not config.pluginmanager.has_plugin(PLUGIN):
        from tests.harness.plugin import RankAgreement  # initialises MPI

        config.pluginmanager.register(RankAgreement(config), PLUGIN)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--once", action="store_true", help="run each test in its own lanes, see run_lanes.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    plugin: RankAgreement | None = config.pluginmanager.get_plugin(PLUGIN)
    once = config.getoption("--once")
    wrong = next((problem for item in items if (problem := _marker_problem(item))), None)
    if wrong is None and once and plugin is not None and plugin.size == HOME_LANES[0]:  # which loads all files
        wrong = next((problem for item in items if (problem := _lane_problem(item))), None)
    if wrong is not None and plugin is not None:
        plugin.reject(wrong)
    if wrong is not None:
        raise pytest.UsageError(wrong)
    if plugin is None:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="runs under mpirun with --with-mpi: python tests/run_lanes.py"))
        return
    fits = [_fits(item, plugin.size) and (not once or plugin.size in _lanes_of(item)) for item in items]
    left_out = [item for item, is_run in zip(items, fits, strict=True) if not is_run]
    items[:] = [item for item, is_run in zip(items, fits, strict=True) if is_run]
    config.hook.pytest_deselected(items=left_out)


def _marker_problem(item: pytest.Item) -> str | None:
    for mark in item.iter_markers("mpi"):
        unknown = [*map(repr, mark.args), *(k for k in mark.kwargs if k not in MARKER_KEYWORDS)]
        if unknown:
            takes = ", ".join(MARKER_KEYWORDS)
            return f"{item.nodeid}: @pytest.mark.mpi does not take {unknown[0]}; it takes the keywords {takes}"
    return None


def _lane_problem(item: pytest.Item) -> str | None:
    for n_ranks in _lanes_of(item):
        if not may_have_tests(item.path, n_ranks):
            return (
                f"{item.nodeid} is a test of {n_ranks} ranks in a file without any of WORDS[{n_ranks}] of run_lanes.py"
            )
    return None


def _lanes_of(item: pytest.Item) -> set[int]:
    return lanes_of(lambda n_ranks: _fits(item, n_ranks), {mark.name for mark in item.iter_markers()})


def _fits(item: pytest.Item, size: int) -> bool:
    limits = [mark.kwargs for mark in item.iter_markers("mpi")]
    callspec = getattr(item, "callspec", None)
    needed = callspec.params.get("mpi_comm", 1) if callspec else 1
    return needed <= size and all(lim.get("min_size", 1) <= size <= lim.get("max_size", size) for lim in limits)


@pytest.fixture
def mpi_comm(request: pytest.FixtureRequest) -> MPI.Intracomm:
    """Return a fresh communicator of all ranks, or of the first ones, as many as the indirect parameter."""
    plugin: RankAgreement = request.config.pluginmanager.get_plugin(PLUGIN)
    return plugin.lend(getattr(request, "param", plugin.size))


@pytest.fixture
def comm(request: pytest.FixtureRequest, mpi_comm: MPI.Intracomm) -> Iterator[Communicator]:
    """Give a communicator over a ring, or as ``@pytest.mark.communicator(...)`` or the indirect topology says.

    With ``parting=True`` it is not closed: the test leaves ranks in different calls, of which closing would tell.
    """
    options: dict[str, Any] = {"topology": "ring", "timeout": TIMEOUT_S}
    for mark in reversed([*request.node.iter_markers("communicator")]):  # the closest comes first
        options |= mark.kwargs
    options.setdefault("arrival_timeout", options["timeout"])
    parting = options.pop("parting", False)
    if hasattr(request, "param"):
        options["topology"] = request.param
    made = Communicator(mpi_comm, **options)
    if parting:
        yield made
        return
    with made:
        yield made
        # closing is no part of the test: on a busy machine ranks come to it at different times
        made.timeout, made.arrival_timeout = max(made.timeout, TIMEOUT_S), max(made.arrival_timeout, TIMEOUT_S)


@pytest.fixture
def folder(mpi_comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    path: Path = mpi_comm.bcast(tmp_path)
    return path


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give ``jitter(seed)``: from now on this rank sleeps now and then, so that messages arrive in another order."""
    return partial(delay_messages, monkeypatch)


@pytest.fixture(params=["at once", "in parts"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the name of a way of vectors: short ones at once, long ones in parts with other work between them."""
    if request.param == "in parts":
        go_in_parts(monkeypatch)
    found: str = request.param
    return found


def go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short vectors go the way of long ones, in many parts and with as few buffers as can be."""
    modules = [module for name, module in sys.modules.items() if name.startswith("mpicomp.")]
    for name, value in (("MOST_BUFFERS", 1), ("BRIEF_ELEMENTS", 0), ("PART_ELEMENTS", 500)):
        known = [module for module in modules if hasattr(module, name)]
        assert known, f"no module has {name}"
        for module in known:
            monkeypatch.setattr(module, name, value)


@pytest.fixture(autouse=True)
def _variables_of_torchrun() -> Iterator[None]:
    """Remove the variables that `register_backend` sets, also in examples: other tests start programs of their own."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
