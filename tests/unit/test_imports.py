"""Allowed imports: the layers of docs/architecture.md, held by reading every import in the tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("collectives", "mpicomp", "apps")
KERNELS = "mpicomp.kernels.cpu"


class Layer(NamedTuple):
    """The folders and the third-party packages that the modules of a folder may import.

    A folder may import itself, the standard library, and foundations: the modules at the top of `collectives` and in
    `collectives.arrays` that import nothing else of ours. What a folder in `own` may import, it does not pass on.
    """

    own: tuple[str, ...] = ()
    third_party: tuple[str, ...] = ()


ARRAYS = ("numpy", "mpi4py")
WAITING = ("collectives.progress",)
BYTES = ("mpicomp.codecs", "mpicomp.kernels", "collectives")
STEPS = ("mpicomp.aggregator", "mpicomp.feedback", "mpicomp.state", "mpicomp.spaces", *BYTES)
OF_TORCH = (
    "buckets", "caller_modes", "devices", "front_ends", "master_weights", "named_tensors", "non_copyable",
    "parameters", "replication", "state",
)  # fmt: skip
VECTORS = ("mpicomp.algorithms", *STEPS, *(f"mpicomp.torch.{part}" for part in OF_TORCH))
# From the bottom to the top. A module belongs to the innermost folder that is listed here.
LAYERS = {
    "collectives.schedules": Layer(),
    "collectives.arrays": Layer((), ARRAYS),
    "collectives.progress": Layer((), ARRAYS),
    "collectives.execution": Layer(("collectives.schedules", *WAITING), ARRAYS),
    "collectives.consistency": Layer(("collectives.execution", *WAITING), ARRAYS),
    "collectives.trace": Layer(("collectives.consistency", "collectives.execution", *WAITING), ARRAYS),
    "collectives.emulation": Layer(
        ("collectives.nodes", "collectives.cost", "collectives.consistency", *WAITING), ARRAYS
    ),
    "collectives.recovery": Layer(
        ("collectives.consistency", "collectives.execution", "collectives.schedules", *WAITING), ARRAYS
    ),
    "collectives.dense": Layer(("collectives.execution", "collectives.schedules", *WAITING), ARRAYS),
    "collectives.cost": Layer(("collectives.schedules", "collectives.execution"), ("numpy",)),
    "collectives": Layer((), (*ARRAYS, "xxhash")),
    "mpicomp.kernels": Layer((), ("numpy", "numba", "llvmlite")),
    "mpicomp.kernels.gpu": Layer(("mpicomp.kernels",), ("numpy", "torch", "triton")),
    "mpicomp.codecs": Layer(("mpicomp.kernels",), ("numpy",)),
    "mpicomp.state": Layer((), ("numpy",)),
    "mpicomp.spaces": Layer(BYTES, ARRAYS),
    "mpicomp.feedback": Layer(("mpicomp.state", "mpicomp.spaces", *BYTES), ("numpy",)),
    "mpicomp.layers": Layer(("mpicomp.spaces", "collectives")),
    "mpicomp.recovery": Layer(("mpicomp.state", "mpicomp.feedback", *BYTES), ARRAYS),
    "mpicomp.aggregator": Layer(
        ("mpicomp.state", "mpicomp.feedback", "mpicomp.layers", "mpicomp.recovery", *BYTES), ARRAYS
    ),
    "mpicomp.reducers": Layer(STEPS, ARRAYS),
    "mpicomp.auto": Layer(("mpicomp.reducers", *STEPS), ARRAYS),
    "mpicomp.nodes": Layer(("mpicomp.auto", *STEPS), ("numpy",)),
    "mpicomp.contrib": Layer(("mpicomp.reducers", *STEPS), ARRAYS),
    "mpicomp.algorithms": Layer(
        ("mpicomp.contrib", "mpicomp.nodes", "mpicomp.auto", "mpicomp.reducers", *STEPS), ARRAYS
    ),
    "mpicomp.torch": Layer(
        ("mpicomp.algorithms", "mpicomp.kernels", *STEPS),
        (*ARRAYS, "torch"),
    ),
    # states know neither buckets nor parameters, and buckets know no states
    "mpicomp.torch.state": Layer(("mpicomp.torch.caller_modes", *STEPS), (*ARRAYS, "torch")),
    "mpicomp.torch.parameters": Layer(("mpicomp.torch.devices", "collectives.consistency"), ("torch",)),
    "mpicomp.torch.buckets": Layer(
        ("mpicomp.torch.parameters", "mpicomp.torch.devices", "mpicomp.algorithms", *STEPS), (*ARRAYS, "torch")
    ),
    "mpicomp.torch.replication": Layer(
        ("mpicomp.torch.named_tensors", "mpicomp.torch.devices", "mpicomp.aggregator", "collectives"),
        (*ARRAYS, "torch"),
    ),
    "mpicomp.torch.synchronizer": Layer(VECTORS, (*ARRAYS, "torch")),
    "mpicomp.torch.local_steps": Layer(("mpicomp.torch.synchronizer", *VECTORS), (*ARRAYS, "torch")),
    "mpicomp.torch.one_bit_adam": Layer(("mpicomp.torch.synchronizer", *VECTORS), (*ARRAYS, "torch")),
    "mpicomp.torch.optimizer": Layer(
        ("mpicomp.torch.local_steps", "mpicomp.torch.one_bit_adam", "mpicomp.torch.synchronizer", *VECTORS),
        (*ARRAYS, "torch"),
    ),
    "mpicomp.pipeline": Layer(("mpicomp.torch", *BYTES), (*ARRAYS, "torch")),
    # rich, Matplotlib and shtab only where they are installed
    "mpicomp.cli": Layer(("mpicomp", "collectives"), (*ARRAYS, "numba", "rich", "matplotlib", "shtab")),
    "mpicomp.torch.process_group": Layer(("mpicomp.torch.devices", "collectives"), (*ARRAYS, "torch")),
    "mpicomp.lightning": Layer(("mpicomp.torch", "collectives"), ("torch", "lightning")),
    "mpicomp.accelerate": Layer(("mpicomp.torch", "collectives"), ("torch", "accelerate")),
    "mpicomp.transformers": Layer(
        ("mpicomp.accelerate", "mpicomp.torch", "collectives"), ("torch", "accelerate", "transformers")
    ),
    "mpicomp.tracking": Layer(("mpicomp.torch", "collectives")),
    "mpicomp": Layer(("collectives",), (*ARRAYS, "numba")),
    "apps": Layer(("mpicomp", "collectives"), ("*",)),
}

# These import PyTorch in functions alone, and only where GPUs, or a step with PyTorch, are asked for.
LAZY = {
    (module, "torch")
    for module in (
        "collectives.arrays.device_lookup",
        "collectives.arrays.torch_device",
        "collectives.arrays.torch_events",
        "collectives.arrays.gpu_mpi.child",
        "mpicomp.cli.bench.vectors",
        "mpicomp.cli.cluster_report.training",
        "mpicomp.cli.doctor.gpu",
        "mpicomp.nodes.torch_group",
    )
}


def inside(module: str, package: str) -> bool:
    """Return whether a module is a package or lies in it."""
    return module == package or module.startswith(package + ".")


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class RunTimeImports(ast.NodeTransformer):
    """Removal of imports for type checkers alone: an annotation may name a class of a layer above."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        for_checkers = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if for_checkers else self.generic_visit(node)


def imported(path: Path) -> Iterator[str]:
    """Yield the name of every module that a file imports when it runs, also in functions."""
    for node in ast.walk(RunTimeImports().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = any((PROJECT / Path(*name.split("."))).with_suffix(s).exists() for s in ("", ".py"))
                yield name if is_module else node.module


@cache
def tree() -> dict[str, set[str]]:
    """Return the imports of every module of ours."""
    files = (path for package in PACKAGES for path in (PROJECT / package).rglob("*.py"))
    return {module_name(path): set(imported(path)) for path in files}


@cache
def foundations() -> set[str]:
    """Return the modules at the top of `collectives` and in `collectives.arrays` that import nothing else of ours."""
    tops = {
        module
        for module in tree()
        if module.startswith("collectives.") and (module.count(".") == 1 or inside(module, "collectives.arrays"))
    }
    ours = {module: {name for name in tree()[module] if name.split(".")[0] in PACKAGES} for module in tops}
    found: set[str] = set()
    while more := {module for module in tops - found if ours[module] <= found}:
        found |= more
    return found


def layer_of(module: str) -> str:
    """Return the innermost listed folder that a module lies in."""
    return max((folder for folder in LAYERS if inside(module, folder)), key=len)


def allowed(module: str, name: str) -> bool:
    """Return whether a module may import another."""
    folder = layer_of(module)
    root = name.split(".", 1)[0]
    if root in PACKAGES:
        return name in foundations() or any(inside(name, package) for package in (folder, *LAYERS[folder].own))
    return (
        (module, root) in LAZY
        or root in sys.stdlib_module_names
        or (root != "tests" and bool({root, "*"} & {*LAYERS[folder].third_party}))
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_imports_only_what_lies_below_it(package: str) -> None:
    modules = (module for module in tree() if inside(module, package))
    assert [(module, name) for module in modules for name in tree()[module] if not allowed(module, name)] == []


def require_no_circle(graph: Mapping[str, Iterable[str]]) -> None:
    """Fail with the names along a circle of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_no_modules_import_each_other_in_a_circle() -> None:
    require_no_circle({module: names - {module} for module, names in tree().items()})


@pytest.mark.parametrize("package", [*PACKAGES, "mpicomp.torch"])
def test_no_folders_import_each_other_in_a_circle(package: str) -> None:
    """A module at the top of the package counts as a folder of its own."""

    def folder(name: str) -> str:
        return ".".join(name.split(".")[: package.count(".") + 2])

    folders: dict[str, set[str]] = {}
    for module, names in tree().items():
        if inside(module, package) and module != package:
            inner = {folder(name) for name in names if inside(name, package)}
            folders.setdefault(folder(module), set()).update(inner - {folder(module), package})
    require_no_circle(folders)


CALLERS = ("mpicomp.codecs", "mpicomp.kernels", "mpicomp.kernels.gpu", "apps")


def test_only_codecs_call_kernels() -> None:
    callers = {module for module, names in tree().items() if any(inside(name, KERNELS) for name in names)}
    others = {module for module in callers if layer_of(module) not in CALLERS}
    assert others == set()


def is_there(path: Path) -> bool:
    """Return whether there is a package or a module."""
    return path.is_dir() or path.with_suffix(".py").exists()


def test_every_rule_is_about_something() -> None:
    assert {folder for folder in LAYERS if not is_there(PROJECT / Path(*folder.split(".")))} == set()


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
