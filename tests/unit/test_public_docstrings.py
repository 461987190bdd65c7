"""Docstrings of public names: parameters, results, errors and an example for each, and the examples run."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.documents import DOCUMENTS, PROJECT, blocks

PACKAGES = (
    *("collectives", "collectives.trace", "mpicomp", "mpicomp.algorithms", "mpicomp.codecs", "mpicomp.pipeline"),
    *("mpicomp.torch", "mpicomp.diagnostics"),
)
# Classes whose objects users get without importing them.
RETURNED = {
    "collectives.communicator.splitting": ("Grid",),
    "collectives.communicator.nodes": ("Nodes",),
    "collectives.cost.rate": ("EmulatedLink",),
    "collectives.schedules.verify": ("ScheduleCost",),
    "mpicomp.pipeline.simulate": ("ScheduleProof", "Timeline"),
}
# Methods and properties that programs use. The others of public classes are for other parts of the library, or for
# methods of the user's own.
USED = {
    "Aggregator": "aggregate begin can_undo check_state_dict load_state_dict residual state_dict undo",
    "Algorithm": "start synchronize",
    "Codec": "alignment decode encode nbytes",
    "Communicator": "allgather allgather_object allreduce barrier broadcast broadcast_object close grid iallreduce "
    "irecv isend nodes recv select send split start_progress_thread",
    "DDPHookState": "aggregators buckets check_state_dict load_state_dict state_dict",
    "DistributedOptimizer": "aggregators buckets check_state_dict join load_state_dict models_differ no_sync "
    "param_groups skip_synchronize state_dict step synchronizations synchronize zero_grad",
    "EmulatedLink": "bytes_per_s parse",
    "FileMessageStore": "flush load_state_dict prefetch read state_dict write",
    "Forward": "destination source",
    "Grid": "along close",
    "Handle": "detach poll then wait",
    "LinkModel": "group latencies load save",
    "Mergeable": "merge",
    "OneBitAdam": "frozen masked steps zero_grad",
    "ZeroOneAdam": "synchronize",
    "PipelineStage": "bytes_sent compare_stores evaluate is_first is_last load_state_dict predict state_dict step "
    "stores_alike",
    "SharedSelection": "alignment bind nbytes votes words",
    "SplitClient": "close predict step turn",
    "SplitServer": "has load_state_dict rank_of serve state_dict",
    "Store": "all_stamps close forget forget_all load_state_dict reset_checksum row_ids row_shape rows stamps "
    "state_dict touched_checksum write",
    "Topology": "name plan",
    "Torus": "shape",
    "Trace": "span",
    "Traffic": "add seconds",
}
OURS = re.compile(r"(collectives|mpicomp)\b")
HEADINGS = ("Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes", "References", "Examples", "See Also")
VAGUE = ("What", "Whether", "How", "Of", "In", "That", "Nothing")
MODULES = sorted(
    ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("collectives", "mpicomp")
    for path in (PROJECT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


def imported(document: Path) -> Iterator[tuple[str, str]]:
    """Give modules and names that the Python blocks of a page import from ours."""
    for block in blocks(document, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and OURS.match(node.module or ""):
                yield from ((str(node.module), one.name) for one in node.names)


def names() -> list[tuple[str, str]]:
    """Return modules and names: all in `__all__` of the public packages, and those that pages import."""
    found = {(module, name) for module, few in RETURNED.items() for name in few}
    for package in PACKAGES:
        module = import_module(package)
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == package]
        found |= {(package, name) for name in getattr(module, "__all__", own)}
    return sorted(found.union(*map(imported, DOCUMENTS)))


def constants() -> Iterator[str]:
    """Give the names of constants and aliases that a docstring follows."""
    for package in ("collectives", "mpicomp"):
        for path in (PROJECT / package).rglob("*.py"):
            body = ast.parse(path.read_text()).body
            for before, after in pairwise(body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    yield ast.unparse(before.target if isinstance(before, ast.AnnAssign) else before.targets[0])


PUBLIC, CONSTANTS = names(), set(constants())


def sections(doc: str) -> dict[str, str]:
    """Return the sections of a docstring by heading; the text before the first one under "" ."""
    heading = re.compile(rf"^({'|'.join(HEADINGS)})\n-+$", re.MULTILINE)
    text, *rest = heading.split(inspect.cleandoc(doc))
    return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


def documented(section: str) -> dict[str, bool]:
    """Return the documented parameters; True if a type or another docstring follows."""
    found = {}
    for entry in re.split(r"\n(?=\S)", section.strip()):
        head, _, body = entry.partition("\n")
        left, colon, _ = head.partition(" : ")
        found |= {name.strip("* "): bool(colon or "*" in left or "As " in body) for name in left.split(",")}
    return found


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return names of parameters, without those of bound functions."""
    first = {"self", "cls"} | ({"comm"} if "collectives.communicator." in function.__module__ else set())
    found = list(inspect.signature(function).parameters)
    return found[1:] if found and found[0] in first else found


def errors_of(function: object) -> set[str]:
    """Return the types of errors that a function raises itself, and does not catch."""
    if not OURS.match(getattr(function, "__module__", "")) or not (found := source_of(function)):
        return set()
    tree = ast.parse(found)
    handled = {
        raised
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and node.handlers
        for statement in node.body
        for raised in ast.walk(statement)
    }
    raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node not in handled)
    called = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in raised if one is not None}
    return {name for name in called if name[0].isupper()}


def source_of(function: Any) -> str:
    """Return the source; empty where `dataclass` has made the function."""
    with suppress(OSError):
        return textwrap.dedent(inspect.getsource(function))
    return ""


def problems(function: Callable[..., Any], doc: str, is_method: bool) -> Iterator[str]:
    """Give the faults of the docstring of a function or method, without its example."""
    parts = sections(doc)
    expected, found = parameters_of(function), documented(parts.get("Parameters", ""))
    if "Parameters" in parts or not is_method:
        if set(expected) != set(found) - {""}:
            yield f"parameters are {expected}, documented are {[*found]}"
        yield from (f"no type of {name}" for name, has_type in found.items() if name and not has_type)
    else:  # of a method with few words: named in the text
        yield from (f"{name} is not named" for name in expected if f"`{name}`" not in doc)
    result = inspect.signature(function).return_annotation
    says = {"Returns", "Yields"} & parts.keys() or (is_method and re.match(r"(Return|Yield)\b", doc))
    if result not in (None, "None", "Self", inspect.Signature.empty) and not says:
        yield f"no result {result}"
    yield from (f"{error} is not named" for error in errors_of(function) if error not in doc)


def docstring(one: Any) -> str:
    """Return the docstring of a method, perhaps of a base class, or a class's own; empty if `dataclass` has made it."""
    if not inspect.isclass(one):
        return inspect.getdoc(one) or ""
    doc = inspect.cleandoc(vars(one).get("__doc__") or "")
    return "" if doc.startswith(f"{one.__name__}(") else doc


def starts_vaguely(doc: str) -> bool:
    return doc.split()[0] in VAGUE


def load(module: str, name: str = "") -> Any:
    """Return a module, or a name of it; skip the test where a package of others is not installed."""
    try:
        found = import_module(module)
        return getattr(found, name) if name else found
    except ImportError as error:
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or OURS.match(cause.name or ""):
            raise
        pytest.skip(f"{cause.name} is not installed")


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_a_public_name_has_parameters_results_errors_and_an_example(package: str, name: str) -> None:
    one = load(package, name)
    if isinstance(one, ModuleType):
        assert f"{package}.{name}" in PACKAGES
        return
    if not (inspect.isclass(one) or inspect.isroutine(one)):
        assert name in CONSTANTS  # or an alias: these have no docstring at run time
        return
    doc = docstring(one)
    assert doc
    assert not starts_vaguely(doc)
    assert ">>> " in sections(doc).get("Examples", "")
    if not inspect.isclass(one):
        assert list(problems(one, doc, is_method=False)) == []
        return
    made = [vars(one)[method] for method in ("__init__", "__post_init__") if inspect.isfunction(vars(one).get(method))]
    assert not {error for method in made for error in errors_of(method)} - set(re.findall(r"\w+", doc))
    is_plain = not inspect.isabstract(one) and not getattr(one, "_is_protocol", False)
    if is_plain and not issubclass(one, Exception):
        fields = sections(doc).get("Attributes", "") if issubclass(one, tuple) else ""
        found = documented(sections(doc).get("Parameters", fields))
        assert set(found) - {""} == set(parameters_of(one))
        assert [name for name, has_type in found.items() if name and not has_type] == []


def examples_of(cls: type) -> str:
    """Return the examples of a class and of its methods."""
    bases = cls.__mro__[:-1]
    members = {name for base in bases for name in vars(base) if name[0] != "_"}
    docs = [*map(docstring, bases), *(docstring(getattr(cls, name)) for name in sorted(members))]
    return "".join(sections(doc).get("Examples", "") for doc in docs)


USED_MEMBERS = [(name, member) for name, members in USED.items() for member in members.split()]


@pytest.mark.parametrize(("name", "member"), USED_MEMBERS)
def test_a_method_that_programs_call_is_described_and_is_in_an_example(name: str, member: str) -> None:
    package = next(package for package, public in PUBLIC if public == name)
    cls = load(package, name)
    found = inspect.getattr_static(cls, member)
    method = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    doc = docstring(getattr(cls, member))
    assert doc
    assert re.search(rf"\b{member}\b", examples_of(cls)) or "` has an example" in doc
    assert not starts_vaguely(doc)
    if inspect.isroutine(method):
        assert list(problems(inspect.unwrap(getattr(method, "_method", method)), doc, is_method=True)) == []


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_show(name: str) -> None:
    module, output, environment = load(name), list[str](), dict(os.environ)
    starts = re.findall(r"^ *>>> (.*)", Path(str(module.__file__)).read_text(), re.MULTILINE)
    if "import torch" in starts:
        pytest.importorskip("torch")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    try:
        for test in doctest.DocTestFinder().find(module, name, globs={}):  # which a reader can copy
            runner.run(test, out=output.append)
    finally:  # `register_backend` sets the variables of torchrun
        os.environ.clear()
        os.environ.update(environment)
    assert not output, "".join(output)
    assert runner.tries == len([line for line in starts if not line.endswith("# doctest: +SKIP")])
