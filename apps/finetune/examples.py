"""A task of text classification from Python's standard library: the subject that a function is about.

An example is the first words of a function's source, in the order in which they stand there: its name, its arguments,
its docstring, its code. Its label is the subject of the module that it comes from, much as the chapters of the
library's manual have it. So every machine can make the data; those of another version of Python differ a little.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Of modules that Python 3.11 to 3.14 have, and that distributions do not put into packages of their own.
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "concurrency": (
        "asyncio", "concurrent", "multiprocessing", "threading", "queue", "subprocess", "sched", "selectors",
    ),
    "internet": (
        "email", "mailbox", "smtplib", "imaplib", "poplib", "http", "urllib", "ftplib", "xmlrpc", "socketserver",
        "wsgiref", "ssl", "socket", "ipaddress",
    ),
    "markup": ("xml", "html", "json", "plistlib", "csv", "configparser"),
    "testing": (
        "unittest", "doctest", "pdb", "bdb", "trace", "cProfile", "profile", "pstats", "timeit", "tracemalloc",
    ),
    "language": (
        "inspect", "ast", "dis", "tokenize", "symtable", "pyclbr", "typing", "dataclasses", "enum", "abc", "functools",
        "types", "pickletools", "pickle", "copyreg", "copy",
    ),
    "numbers": ("_pydecimal", "fractions", "statistics", "random", "numbers", "datetime", "calendar", "colorsys"),
    "files": (
        "pathlib", "os", "posixpath", "ntpath", "shutil", "tarfile", "zipfile", "glob", "fnmatch", "tempfile",
        "filecmp", "_pyio", "gzip", "bz2", "lzma",
    ),
    "imports": ("importlib", "pkgutil", "zipimport", "runpy", "modulefinder", "zipapp", "compileall", "py_compile"),
    "text": (
        "string", "re", "textwrap", "difflib", "codecs", "encodings", "locale", "gettext", "argparse", "optparse",
        "logging", "getopt", "reprlib", "pprint",
    ),
}  # fmt: skip
LABELS = tuple(SUBJECTS)
WORDS = 16
"""Words of an example."""
DISTINCT_WORDS = 12
"""No two examples begin with the same so many words, which the model sees whole."""
TEST, VALIDATION, MOST = 115, 50, 600
"""Examples of each subject: to test, to choose settings by, and altogether at most; the others are to train."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_TESTS = {"test", "tests"}  # some distributions leave these folders out


class Example(NamedTuple):
    """The words of a function, with spaces between, and the index of its label in `LABELS`."""

    text: str
    label: int


@dataclass(frozen=True)
class Examples:
    """Three parts without a text in common: a function of the standard library alone, in one order."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]

    def digest(self) -> str:
        """Digest of these examples, which differ between versions of Python: 16 hexadecimal digits."""
        return _digest(repr((self.train, self.validation, self.test)))[:16]


@cache
def load() -> Examples:
    """The examples of this Python; ValueError if its standard library has too few functions."""
    texts: dict[str, Example] = {}
    for label, modules in enumerate(SUBJECTS.values()):
        for text in _texts(modules):
            beginning = " ".join(text.split()[:DISTINCT_WORDS])
            texts.setdefault(beginning, Example(text, label))
    return split(texts.values())


def split(examples: Iterable[Example]) -> Examples:
    """Take the same number of each label to test and to validate by, and up to `MOST` in all; ValueError if too few."""
    parts: tuple[list[Example], ...] = ([], [], [])
    for label, name in enumerate(LABELS):
        # by a hash of the text alone: the order of the examples does not matter
        own = sorted((one for one in examples if one.label == label), key=lambda one: _digest(one.text))[:MOST]
        if len(own) <= TEST + VALIDATION:
            raise ValueError(
                f"the standard library of this Python has {len(own)} functions about {name}, and more than "
                f"{TEST + VALIDATION} are needed: install the sources of the library"
            )
        parts[0].extend(own[TEST + VALIDATION :])
        parts[1].extend(own[TEST : TEST + VALIDATION])
        parts[2].extend(own[:TEST])
    return Examples(*map(tuple, parts))


def words(source: str) -> str:
    """The first words of a source text: letters only, in lower case, names cut into their words."""
    return " ".join(word.lower() for word in _WORD.findall(source)[:WORDS])


def functions(source: str) -> Iterator[str]:
    """The source of each function and method, without those that are defined within functions."""
    lines = source.splitlines()
    stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "\n".join(lines[node.lineno - 1 : node.end_lineno])
            else:
                stack.append(node)


def _texts(modules: Iterable[str]) -> Iterator[str]:
    for path in _files(modules):
        for source in functions(path.read_text("utf-8")):
            text = words(source)
            if text.count(" ") >= DISTINCT_WORDS - 1:
                yield text


def _files(modules: Iterable[str]) -> Iterator[Path]:
    """Sources of modules and packages, without those of tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in modules:
        found = sorted((library / name).rglob("*.py")) or [library / f"{name}.py"]
        yield from (path for path in found if path.exists() and not _TESTS & {*path.relative_to(library).parts})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
