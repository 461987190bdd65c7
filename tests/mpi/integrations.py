"""Set-up of the tests with Lightning, Accelerate, Transformers and TensorBoard: `make test-integrations` has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from collectives.communicator.stopping import STOP
from mpicomp.torch.process_group.joining import leave_process_group
from tests.documents import PROJECT, blocks

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION")
MARKS = [
    pytest.mark.mpi(max_size=3),
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # the packages warn of few workers for data, and the like
]


def run_block(module: str) -> None:
    """Run the program of the page docs/integrations.md that imports from a module."""
    (code,) = (code for code in blocks(PROJECT / "docs" / "integrations.md", "python") if f"from {module} " in code)
    exec(compile(code, f"integrations.md, {module}", "exec"), {"__name__": "program"})


def require(package: str) -> None:
    """Skip the module where a package is missing."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-integrations installs it", allow_module_level=True)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each scalar in the one file of TensorBoard in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("*tfevents*")
    events = EventAccumulator(str(file)).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    """End the process group, and forget variables, the state of all accelerators, and a signal that has come."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    yield
    leave_process_group()
    STOP.requested = False  # a process that has had a signal takes no other
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
