"""The scripts of examples/ run on two ranks and learn; those whose packages are missing are skipped."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from apps.launch import PROJECT, mpi_environment, python_command, run

FOLDER, PAGE = PROJECT / "examples", PROJECT / "docs" / "examples.md"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
STEPS = {"plain_loop": 60, "ddp": 60, "fsdp2": 20, "lightning_fit": 60, "accelerate_loop": 60}
HELPERS = {"fashion_mnist", "run_all", "sentences"}
N_CLASSES, SIDE = 10, 28


def packages(script: Path) -> set[str]:
    """Return the packages that a script imports, its own neighbours left out."""
    tree = ast.walk(ast.parse(script.read_text()))
    found = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in found} - SCRIPTS.keys() - {"apps", "mpicomp"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of images that look like Fashion-MNIST to a reader, and are easy to learn."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    prototypes = random.integers(0, 200, (N_CLASSES, SIDE, SIDE))
    for prefix, n in (("train", 4000), ("t10k", 200)):
        labels = random.integers(0, N_CLASSES, n)
        pixels = prototypes[labels] + random.integers(0, 56, (n, SIDE, SIDE))
        for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            (folder / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", STEPS)
def test_an_example_learns_on_two_ranks(name: str, images: Path) -> None:
    missing = sorted(package for package in packages(SCRIPTS[name]) if find_spec(package) is None)
    if missing:
        pytest.skip(f"make examples installs {', '.join(missing)}")
    command = python_command(2, [str(SCRIPTS[name]), "--steps", str(STEPS[name])])
    status, output = run(command, mpi_environment() | {"FASHION_MNIST": str(images)}, timeout_s=200)
    assert status == 0, output
    found = re.findall(r"accuracy (\d+\.\d)%", output)
    assert len(found) == 1, output  # one rank prints
    assert float(found[0]) > 80, output
