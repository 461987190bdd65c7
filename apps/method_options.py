"""Table of the options of young methods in ``docs/contrib.md``, made of their registrations and docstrings.

``python -m apps.method_options`` writes it, and a test compares it. Methods with a page of their own are left out.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, cast

import mpicomp
from apps.appendices import publish
from apps.launch import PROJECT

PAGE, METHODS = PROJECT / "docs" / "contrib.md", PROJECT / "docs" / "choose.md"


def describe_options(kind: type) -> dict[str, str]:
    """Return the text of each parameter in a class's docstring."""
    section = (inspect.getdoc(kind) or "").partition("\nParameters\n----------\n")[2]
    section = re.split(r"\n\n\w+\n-+\n", section)[0]
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^(\w[\w, ]*)(?: :.*)?\n((?: +.*\n?|\n)+)", section + "\n", re.MULTILINE):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


def make_table() -> str:
    """Return the methods of `mpicomp.contrib` without a page of their own, and a table of their options."""
    links = dict(re.findall(r"^\| \[`([\w-]+)`\]\(([\w-]+\.md)\)", METHODS.read_text(), re.MULTILINE))
    methods, lines = [], ["", "| option | default | of | meaning |", "|---|---|---|---|"]
    for name, kind in mpicomp.ALGORITHMS.items():
        if kind.__module__.startswith("mpicomp.contrib.") and links.get(name, PAGE.name) == PAGE.name:
            texts, about = describe_options(kind), (inspect.getdoc(kind) or "").partition("\n")[0]
            about = about.removeprefix("Options of ")
            methods.append(f"- `{name}`, `{kind.__module__}.{kind.__name__}`: {about}")
            lines += (
                f"| `{field.name}` | `{field.default!r}` | `{name}` | {texts[field.name]} |"
                for field in dataclasses.fields(cast(Any, kind))
            )
    return "\n".join([*methods, *lines])


if __name__ == "__main__":
    publish(PAGE, "options", make_table())
