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
from tests.unit.faults.jobs import FAULT_TOLERANT, warm_ranks

FOLDER = PROJECT / "examples"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
HELPERS = {"images", "minilm", "sentences", "run_all"}
# Steps, and the accuracy in per cent that comes of them; with the pretrained model it is enough that there is one.
CASES = {
    "plain_loop": (60, 80),
    "ddp": (60, 80),
    "fsdp2": (20, 80),
    "hsdp": (40, 80),
    "lightning_fit": (60, 80),
    "accelerate_loop": (60, 80),
    "trainer": (2, 0),
    "pretrained": (2, 0),
}
N_CLASSES, SIDE = 10, 28
WRAPPED = ("accelerate", "lightning", "transformers")  # which modules of mpicomp import


def packages(name: str) -> set[str]:
    """Return the packages that a program and its neighbours import."""
    modules = {one.module for one in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(one, ast.ImportFrom)}
    names = {module for module in modules if module}
    roots = {name.split(".")[0] for name in names} | {one for one in WRAPPED if f"mpicomp.{one}" in names}
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


def start_warm(n_ranks: int, program: Path, *options: str) -> list[str]:
    """Return the command of ranks that are copies of a process with PyTorch: importing it takes most of a short job."""
    mpirun, *others = python_command(n_ranks, warm_ranks().command(program, options)[1:])
    return [mpirun, *FAULT_TOLERANT, *others]


def printed_line(command: list[str], first: str, **variables: str) -> str:
    """Run a job, and return the line that one of its ranks has printed and that begins with a word."""
    status, output = run(command, mpi_environment() | variables, timeout_s=200)
    assert status == 0, output
    assert re.search(r"^(\d ranks, step 0 of \d+$|\{'loss': )", output, re.MULTILINE), output  # shown at once
    (line,) = re.findall(rf"^{first} .*$", output, re.MULTILINE)
    return line


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_an_example_learns_on_two_ranks(name: str, images: Path) -> None:
    missing = sorted(package for package in packages(name) if find_spec(package) is None)
    if missing:
        pytest.skip(f"make examples installs {', '.join(missing)}")
    steps, least = CASES[name]
    command = start_warm(2, FILES[name], "--steps", str(steps))
    line = printed_line(command, "accuracy", FASHION_MNIST=str(images))
    assert all(float(found) >= least for found in re.findall(r"(\d+\.\d)%", line)), line


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["accelerate_loop", "ddp", "hsdp", "plain_loop", "pretrained", "trainer"])
def test_an_example_without_compression_sends_more(name: str, images: Path) -> None:
    missing = sorted(package for package in packages(name) if find_spec(package) is None)
    if missing:
        pytest.skip(f"make examples installs {', '.join(missing)}")
    commands = [start_warm(2, FILES[name], "--steps", "2", *options) for options in ((), ("--dense",))]
    lines = [printed_line(command, "accuracy", FASHION_MNIST=str(images)) for command in commands]
    compressed, dense = (float(re.findall(r"rank 0 sent (\d+(?:\.\d)?) MB", line)[0]) for line in lines)
    assert dense > 1.2 * compressed, lines  # Marsit has full-precision rounds


@pytest.mark.timeout(240)
def test_without_the_images_an_example_learns_digits() -> None:
    """Start it as its page does, from scratch."""
    pytest.importorskip("torch")
    command = python_command(2, [str(FILES["plain_loop"]), "--steps", "60"])
    line = printed_line(command, "accuracy", FASHION_MNIST="digits")
    assert float(re.findall(r"(\d+\.\d)%", line)[0]) >= 80, line


def test_digits_have_the_size_of_the_images(monkeypatch: pytest.MonkeyPatch, run_all: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("FASHION_MNIST", "digits")
    images = import_module("images")
    train, test = images.images()
    assert [len(train), len(test)] == [25866, 360]
    assert train[0][0].shape == test[0][0].shape == (1, SIDE, SIDE)
    again, _ = images.images()
    assert all(torch.equal(*pair) for pair in zip(train.tensors, again.tensors, strict=True))
    assert set(train.tensors[1].tolist()) == set(range(10))


def test_data_are_looked_for_in_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_all: ModuleType) -> None:
    images = import_module("images")
    monkeypatch.setattr(images, "FASHION_MNIST_FOLDER", tmp_path / "none")
    monkeypatch.delenv("FASHION_MNIST", raising=False)
    assert images.find_images() == "digits"
    (tmp_path / "none").mkdir()
    assert images.find_images() == str(tmp_path / "none")
    monkeypatch.setenv("FASHION_MNIST", "/elsewhere")
    assert images.find_images() == "/elsewhere"


def test_a_wrong_folder_is_named_with_the_cure(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environment = mpi_environment() | {"FASHION_MNIST": str(tmp_path / "none")}
    status, output = run(python_command(None, [str(FILES["plain_loop"]), "--steps", "1"]), environment, timeout_s=50)
    assert status != 0
    assert f"there is no folder {tmp_path / 'none'}: name the folder of Fashion-MNIST's four files by" in output


def test_the_runner_and_the_page_have_all_examples(run_all: ModuleType) -> None:
    names = FILES.keys() - HELPERS
    assert set(run_all.EXAMPLES) == names == CASES.keys()
    assert {row[0].strip("`") for row in tables(PROJECT / "docs" / "examples.md")["example"]} == {
        f"{name}.py" for name in names
    }


def test_an_example_is_short_and_shows_its_command() -> None:
    for name in FILES.keys() - HELPERS:
        text = FILES[name].read_text()
        assert f"\n    mpirun -n 2 python examples/{name}.py\n" in text.split('"""')[1], name
        assert len(text.splitlines()) <= 80, name


def test_the_runner_fails_where_an_example_fails(
    run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, ...]] = []
    environments = []

    def stand_in(command: list[str], environment: dict[str, str], **_: object) -> tuple[int, str]:
        words = [word for word in command if word.endswith(".py") or word == "--dense"]
        started.append((Path(words[0]).stem, *words[1:]))
        environments.append(environment["FASHION_MNIST"])
        return int(started[-1][0] == "ddp"), f"a warning\naccuracy {len(started)}.0%"

    looked = iter(["digits", "/folder"])
    monkeypatch.setattr(run_all, "find_images", lambda: next(looked))
    monkeypatch.setattr(run_all, "run", stand_in)
    assert run_all.main(["--only", "ddp", "plain"]) == 1
    assert started == [("plain_loop",), ("plain_loop", "--dense"), ("ddp",)]
    assert environments == ["digits"] * 3  # found once, for all
    out, err = capsys.readouterr()
    assert err == "failed: ddp\n"
    assert "images: digits of scikit-learn\n" in out
    assert "as it is (0 s): accuracy 1.0%\ndense    (0 s): accuracy 2.0%\n" in out
    assert "as it is (status 1, 0 s): a warning\n" in out  # all that a failing example has printed
    assert run_all.main(["--only", "fsdp"]) == 0
    assert started[3:] == [("fsdp2",)]
    assert "images: /folder\n" in capsys.readouterr().out


# Nodes with several GPUs ----------------------------------------------------------------------------------------------


ON_NODES = {path.stem: path for path in sorted((FOLDER / "gpu_nodes").glob("*.py")) if path.stem != "gpt"}
SMALL = ("--layers", "2", "--width", "64", "--context", "32", "--batch", "4", "--ranks-per-node", "2")


def on_two_nodes(name: str, *options: str) -> tuple[float, float]:
    """Run a script as two nodes of two ranks, with Gloo in NCCL's place; return its loss and the MB of rank 0."""
    line = printed_line(start_warm(4, ON_NODES[name], *SMALL, *options), "loss")
    found = re.match(r"loss (\d\.\d\d) after \d+ steps; rank 0 sent (\d+\.\d\d) MB to", line)
    assert found, line
    return float(found[1]), float(found[2])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ON_NODES)
def test_a_script_for_gpu_nodes_learns_and_sends_few_bits_between_nodes(name: str) -> None:
    pytest.importorskip("torch")
    loss, sent = on_two_nodes(name, "--steps", "30", "--accumulate", "2")
    assert loss < 4.5  # of 5.55 nats at the beginning
    _, dense = on_two_nodes(name, "--steps", "10", "--dense")
    parts = 3 if name == "local_steps" else 1  # thirty steps and ten have three synchronizations and one
    assert dense > 2.2 * sent / (3 if parts == 1 else parts)


@pytest.mark.timeout(240)
def test_steps_since_the_last_synchronization_are_taken_in_at_the_end() -> None:
    pytest.importorskip("torch")
    _, sent = on_two_nodes("local_steps", "--steps", "1")
    assert sent > 0


def test_the_page_of_gpu_nodes_has_the_lines_of_the_scripts() -> None:
    page = (PROJECT / "docs" / "gpu-nodes.md").read_text()
    (block,) = re.findall(r"The lines of FSDP2, .*?```text\n(.*?)```", page, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for line in ON_NODES["fsdp2"].read_text().splitlines()]
    assert [line for line in block.splitlines() if line not in lines] == []
    assert {row[0].strip("`") for row in tables(PROJECT / "docs" / "gpu-nodes.md")["script"]} == {
        f"examples/gpu_nodes/{name}.py" for name in ON_NODES
    }
