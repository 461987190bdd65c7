"""The site of the documentation: its navigation has every page, and its reference every public name."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from tests.documents import DOCUMENTS, PROJECT, blocks

REFERENCE = tomllib.loads((PROJECT / "docs" / "site" / "reference.toml").read_text())
PACKAGES, MEMBERS = REFERENCE.pop("packages"), REFERENCE.pop("members")
NAMES = [f"{module}.{name}" for page in REFERENCE.values() for module, names in page["names"].items() for name in names]
GENERATED = {"index.md", "contributing.md", "changelog.md", "reference.md", *(f"{page}.md" for page in REFERENCE)}
EXAMPLES = {
    (statement.module, name.name)
    for document in DOCUMENTS
    for block in blocks(document, "python")
    for statement in ast.walk(ast.parse(block))
    if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.split(".")[0] != "tests"
    for name in statement.names
}


def resolve(path: str) -> Any:
    """Return the object of a path: a module's, or a name's in one."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"^ *- (?:Start: )?([\w-]+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(GENERATED | {path.name for path in (PROJECT / "docs").glob("*.md")})


def test_the_reference_lists_a_name_once() -> None:
    assert sorted(NAMES) == sorted(set(NAMES))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_its_entry_in_the_reference(package: str) -> None:
    module = import_module(package)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    entries = [resolve(name) for name in NAMES]
    assert names
    assert [name for name in names if not any(getattr(module, name) is entry for entry in entries)] == []


def test_every_name_that_an_example_imports_has_its_entry_in_the_reference() -> None:
    ours = [(module, name) for module, name in EXAMPLES if module.split(".")[0] in ("mpicomp", "collectives")]
    found = [(f"{module}.{name}", resolve(f"{module}.{name}")) for module, name in ours]
    entries = [resolve(name) for name in NAMES]
    wanted = [(path, value) for path, value in found if not isinstance(value, ModuleType)]
    assert [path for path, value in wanted if not any(value is entry for entry in entries)] == []


def test_members_in_the_reference_exist() -> None:
    for path, members in MEMBERS.items():
        assert [name for name in members if not hasattr(resolve(path), name)] == []
