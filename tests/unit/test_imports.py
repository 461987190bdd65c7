"""Who may import whom: the layers of docs/architecture.md, held by reading every import in the tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).resolve().parents[2]


class Layer(NamedTuple):
    """What a folder, or a module, may import beside the standard library and itself."""

    folder: str
    own: tuple[str, ...]
    third_party: tuple[str, ...] = ()


# From the bottom to the top. The first folder that a module lies in is its layer.
LAYERS = (
    Layer("collectives.schedules", ()),
    Layer("collectives.errors", ()),
    Layer("collectives.json_file", (), ("numpy",)),
    Layer("collectives.memory", (), ("numpy",)),
    Layer("collectives.trace", ("collectives",), ("numpy", "mpi4py")),
    Layer(
        "collectives.cost",
        ("collectives.schedules", "collectives.execution.partition", "collectives.json_file"),
        ("numpy",),
    ),
    Layer("collectives", (), ("numpy", "mpi4py")),
    Layer("mpicomp.kernels.streams", (), ("numpy",)),
    Layer("mpicomp.kernels", (), ("numpy", "numba", "llvmlite")),
    Layer("mpicomp.codecs", ("mpicomp.kernels", "collectives.memory"), ("numpy",)),
    Layer("mpicomp.aggregator", ("mpicomp.codecs", "mpicomp.kernels", "collectives"), ("numpy", "mpi4py")),
    Layer(
        "mpicomp.reducers",
        ("mpicomp.aggregator", "mpicomp.codecs", "mpicomp.kernels", "collectives"),
        ("numpy", "mpi4py"),
    ),
    Layer(
        "mpicomp.algorithms",
        ("mpicomp.reducers", "mpicomp.aggregator", "mpicomp.codecs", "mpicomp.kernels", "collectives"),
        ("numpy", "mpi4py"),
    ),
    Layer("mpicomp.checkpoint", ("mpicomp.aggregator", "collectives.json_file"), ("numpy",)),
    Layer("mpicomp.torch", ("mpicomp", "collectives"), ("numpy", "mpi4py", "torch")),
    Layer("mpicomp", ("collectives",), ("numpy", "mpi4py", "numba")),
    Layer("apps", ("mpicomp", "collectives"), ("*",)),
)


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every module imported anywhere in a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "." * node.level
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = any((PROJECT / Path(*name.split("."))).with_suffix(s).exists() for s in ("", ".py"))
                yield node.lineno, name if is_module else node.module


def violations(path: Path) -> Iterator[str]:
    module = module_name(path)
    layer = next(layer for layer in LAYERS if inside(module, layer.folder))
    for line, name in imported(path):
        root = name.split(".", 1)[0]
        allowed = (
            root in sys.stdlib_module_names
            or any(inside(name, package) for package in (layer.folder, *layer.own))
            or (root not in ("collectives", "mpicomp", "apps", "tests") and {root, "*"} & {*layer.third_party})
        )
        if not allowed:
            yield f"{path.relative_to(PROJECT)}:{line}: {module} may not import {name or '(a relative name)'}"


def source_files() -> list[Path]:
    return sorted(p for package in ("collectives", "mpicomp", "apps") for p in (PROJECT / package).rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    assert not list(violations(path))


def test_importing_starts_no_thread_and_loads_no_torch() -> None:
    script = (
        "import os, sys, threading\n"
        "before = dict(os.environ)\n"
        "import collectives, mpicomp\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert dict(os.environ) == before, 'the environment was changed'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_reads_files_needs_no_mpi() -> None:
    script = (
        "import sys\n"
        "sys.modules['mpi4py'] = None\n"
        "import collectives.cost.link, collectives.json_file, collectives.schedules.ring, mpicomp.cli.trace\n"
        "from collectives import LinkModel, Ring\n"
        "from mpicomp import load_state, redistribute, save_state\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
