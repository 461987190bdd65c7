"""The programs of examples/ run on two ranks and learn; those whose packages are missing are skipped."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from apps.launch import PROJECT, mpi_environment, python_command, run
from tests.documents import tables

FOLDER = PROJECT / "examples"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
HELPERS = {"fashion_mnist", "minilm", "sentences", "run_all"}
# Steps, and the accuracy in per cent that comes of them; with the pretrained model it is enough that there is one.
CASES = {
    "plain_loop": (60, 80),
    "ddp": (60, 80),
    "fsdp2": (20, 80),
    "lightning_fit": (60, 80),
    "accelerate_loop": (60, 80),
    "trainer": (2, 0),
    "pretrained": (2, 0),
}
N_CLASSES, SIDE = 10, 28


def packages(name: str) -> set[str]:
    """Return the packages that a program and its neighbours import."""
    modules = {one.module for one in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(one, ast.ImportFrom)}
    roots = {module.split(".")[0] for module in modules if module}
    return (roots - FILES.keys()).union(*(packages(neighbour) for neighbour in roots & FILES.keys()))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make files that look like Fashion-MNIST to their reader, and are easy to learn."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    prototypes = random.integers(0, 200, (N_CLASSES, SIDE, SIDE))
    for prefix, n in (("train", 4000), ("t10k", 200)):
        labels = random.integers(0, N_CLASSES, n)
        pixels = prototypes[labels] + random.integers(0, 56, (n, SIDE, SIDE))
        for name, array in ((f"{prefix}-images-idx3-ubyte", pixels), (f"{prefix}-labels-idx1-ubyte", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            (folder / name).write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "run_all", raising=False)
    return import_module("run_all")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_an_example_learns_on_two_ranks(name: str, images: Path) -> None:
    missing = sorted(package for package in packages(name) if find_spec(package) is None)
    if missing:
        pytest.skip(f"make examples installs {', '.join(missing)}")
    steps, least = CASES[name]
    command = python_command(2, [str(FILES[name]), "--steps", str(steps)])
    status, output = run(command, mpi_environment() | {"FASHION_MNIST": str(images)}, timeout_s=200)
    assert status == 0, output
    (line,) = re.findall(r"^accuracy .*$", output, re.MULTILINE)  # one rank prints
    assert all(float(found) >= least for found in re.findall(r"(\d+\.\d)%", line)), output


def test_without_the_images_an_example_says_where_to_get_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environment = mpi_environment() | {"FASHION_MNIST": str(tmp_path / "none")}
    status, output = run(python_command(None, [str(FILES["plain_loop"]), "--steps", "1"]), environment, timeout_s=50)
    assert status != 0
    assert f"there is no folder {tmp_path / 'none'}: install Debian's package dataset-fashion-mnist" in output


def test_the_runner_and_the_page_have_all_examples(run_all: ModuleType) -> None:
    names = FILES.keys() - HELPERS
    assert set(run_all.EXAMPLES) == names == CASES.keys()
    assert {row[0].strip("`") for row in tables(PROJECT / "docs" / "examples.md")["example"]} == {
        f"{name}.py" for name in names
    }


def test_an_example_is_short_and_says_how_to_start_it() -> None:
    for name in FILES.keys() - HELPERS:
        text = FILES[name].read_text()
        assert f"\n    mpirun -n 2 python examples/{name}.py\n" in text.split('"""')[1], name
        assert len(text.splitlines()) <= 80, name


def test_the_runner_fails_where_an_example_fails(
    run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def stand_in(command: list[str], *_: object, **__: object) -> tuple[int, str]:
        started.append(Path(command[-1]).stem)
        return int(started[-1] == "ddp"), "accuracy 9.9%"

    monkeypatch.setattr(run_all, "run", stand_in)
    assert run_all.main(["--only", "ddp", "plain"]) == 1
    assert started == ["plain_loop", "ddp"]
    assert capsys.readouterr().err == "failed: ddp\n"
    assert run_all.main(["--only", "fsdp"]) == 0
