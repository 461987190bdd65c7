"""Text for the examples with transformers: sentences of Python's own documentation, classified by subject.

Every Python installation contains them, so nothing is downloaded.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator
from importlib import import_module

SUBJECTS = {
    "dates": ("calendar", "datetime", "time", "zoneinfo"),
    "files": ("os", "pathlib", "shutil", "tempfile", "zipfile", "tarfile"),
    "mail": ("email.message", "email.utils", "imaplib", "mailbox", "smtplib"),
    "network": ("http.client", "http.server", "selectors", "socket", "ssl", "urllib.request"),
    "numbers": ("decimal", "fractions", "math", "random", "statistics"),
    "tests": ("doctest", "unittest", "unittest.mock"),
}


def sentences() -> tuple[list[str], list[int]]:
    """Return sentences in a random order, which is the same every time, and the number of each one's subject."""
    found = {text: label for label, modules in enumerate(SUBJECTS.values()) for name in modules for text in _in(name)}
    pairs = sorted(found.items())
    random.Random(0).shuffle(pairs)
    return [text for text, _ in pairs], [label for _, label in pairs]


def _in(name: str) -> Iterator[str]:
    """Yield the sentences of a module's documentation that have 5 to 40 words and no code."""
    module = import_module(name)
    homes = {name, f"_{name}", "posix"}  # functions of "os" come from "posix"
    members = [member for member in vars(module).values() if getattr(member, "__module__", "") in homes]
    members += [inner for one in members if inspect.isclass(one) for inner in vars(one).values()]
    documented = (one for one in (module, *members) if inspect.ismodule(one) or callable(one))
    for member in documented:
        for text in re.split(r"(?<=[.:])\s+|\n\s*\n", inspect.getdoc(member) or ""):
            if 5 <= len(text.split()) <= 40 and not re.search(r">>>|->|=", text):
                yield " ".join(text.split())
