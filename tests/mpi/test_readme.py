"""The Python examples of README and docs run on one rank and on several."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from tests.documents import DOCUMENTS, PROJECT, blocks
from tests.mpi.examples import run
from tests.mpi.lanes import few_ranks

# A first torch optimizer loads torch's compiler: on several ranks that share two cores this takes long.
pytestmark = [few_ranks, pytest.mark.timeout(240)]

README = PROJECT / "README.md"
GPU, INTEGRATIONS = PROJECT / "docs" / "gpu.md", PROJECT / "docs" / "integrations.md"
APART = (README, GPU, INTEGRATIONS, *PROJECT.glob("docs/migrating*.md"))  # which have tests of their own
OTHERS = [document for document in DOCUMENTS if document not in APART and blocks(document, "python")]


@pytest.fixture(autouse=True)
def examples_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restores the hook that install_abort_hook wraps
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("document", OTHERS, ids=lambda path: path.name)
def test_the_examples_run(document: Path, mpi_comm: MPI.Intracomm) -> None:
    run(document)


def test_the_example_of_the_readme_learns_one_model_on_all_ranks(mpi_comm: MPI.Intracomm) -> None:
    learned = run(README)
    model, truth = learned["model"].weight.detach().numpy()[0], learned["truth"].numpy()
    assert len(set(mpi_comm.allgather(model.tobytes()))) == 1
    assert np.linalg.norm(model - truth) < 0.2 * np.linalg.norm(truth)


def test_the_examples_with_a_gpu_run_without_one_too(mpi_comm: MPI.Intracomm) -> None:
    names: dict[str, Any] = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for example in blocks(GPU, "python"):
        assert '"cuda"' in example
        text = example.replace('"cuda"', f'"{device}"')
        exec(text if device == "cuda" else text.replace("torch.cuda.device_count()", "1"), names)
    found = names["total"], names["mean"], *names["model"].parameters()
    assert {tensor.device.type for tensor in found} == {device}
    names["comm"].close()
