"""The Python examples of README and docs run on every number of ranks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.documents import DOCUMENTS, PROJECT, blocks

# A first torch optimizer loads torch's compiler: on eight ranks that share two cores this takes most of a minute.
pytestmark = pytest.mark.timeout(240)

README = PROJECT / "README.md"
OTHERS = [document for document in DOCUMENTS if document != README and blocks(document, "python")]


@pytest.fixture(autouse=True)
def examples_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back what install_abort_hook wraps
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.chdir(tmp_path)


def run(document: Path) -> dict[str, Any]:
    """Run a document's examples one after the other, as its reader would; returns their names."""
    namespace: dict[str, Any] = {"__name__": f"example in {document.name}"}
    sys.modules[namespace["__name__"]] = type(sys)(namespace["__name__"])  # where dataclasses look for their module
    try:
        for number, code in enumerate(blocks(document, "python"), 1):
            exec(compile(code, f"{document.name}, example {number}", "exec", dont_inherit=True), namespace)
    finally:
        del sys.modules[namespace["__name__"]]
    return namespace


@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.name)
def test_the_examples_run(document: Path, mpi_comm: MPI.Intracomm) -> None:
    run(document)


def test_the_example_of_the_readme_learns_one_model_on_all_ranks(mpi_comm: MPI.Intracomm) -> None:
    learned = run(README)
    model, truth = learned["model"], learned["truth"]
    assert len(set(mpi_comm.allgather(model.tobytes()))) == 1
    assert np.linalg.norm(model - truth) < 0.2 * np.linalg.norm(truth)
