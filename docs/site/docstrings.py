"""Extension of griffe, which reads the sources for the reference: bound functions as methods, links in docstrings."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc):`~?([^`]+)`")
_PAGE = re.compile(r"(?<!`)\bdocs/([\w-]+)\.md\b")


class PublicDocstrings(griffe.Extension):
    """Make methods of the functions that a class body binds, as in ``send, recv = messages.send, messages.recv``."""

    def __init__(self) -> None:
        super().__init__()
        self._bound: list[tuple[griffe.Class, str, str]] = []

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Note the bound functions; those of modules that are not read yet cannot be found now."""
        for statement in node.body:
            if isinstance(statement, ast.Assign):
                for name, value in _assigned(statement):
                    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                        home = value.value.id
                        if home in cls.module.members:
                            self._bound.append((cls, name, f"{cls.module.resolve(home)}.{value.attr}"))

    def on_package(self, *, loader: Any, **_: Any) -> None:
        """Make the methods once a whole package has been read."""
        for cls, name, path in self._bound:
            try:
                function = loader.modules_collection[path]
            except KeyError:
                continue
            if function.is_function and not function.is_alias:
                method = copy.copy(function)
                first, *others = function.parameters
                method.parameters = griffe.Parameters(griffe.Parameter("self", kind=first.kind), *others)
                method.name = name
                cls.set_member(name, method)
        self._bound.clear()

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write roles as code, and names of pages as links."""
        if obj.docstring is not None:
            value = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _PAGE.sub(r"[docs/\1.md](\1.md)", value)


def _assigned(statement: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=True):
            if isinstance(name, ast.Name):
                yield name.id, part
