"""Set-up of the tests with Lightning, Accelerate and Transformers, which `make test-integrations` installs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from collectives.communicator.stopping import STOP
from mpicomp.torch.process_group.joining import leave_process_group
from tests.documents import PROJECT, blocks

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


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    """End the process group, and forget a signal: a process that has had one takes no other."""
    yield
    leave_process_group()
    STOP.requested = False
