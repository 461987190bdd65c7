"""The package in pyproject.toml: its version, its links, and a complete source archive."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tomllib

import mpicomp
from tests.documents import PROJECT

BUILD = tomllib.loads((PROJECT / "pyproject.toml").read_text())
# The builder adds these unasked; PKG-INFO is in an unpacked archive.
ADDED = {".gitignore", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO"}
HIDDEN = (".ci", ".gitignore")  # other hidden files are an editor's, or git's


def test_all_of_a_checkout_is_in_the_source_archive_so_that_its_tests_run() -> None:
    ignored = [line.strip("/") for line in (PROJECT / ".gitignore").read_text().splitlines() if line]
    names = {path.name for path in PROJECT.iterdir() if not path.name.startswith(".") or path.name in HIDDEN}
    kept = {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)}
    included = {entry.removeprefix("/") for entry in BUILD["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert kept - ADDED == included, "name it in pyproject.toml, or in .gitignore"


def test_versions_agree() -> None:
    assert BUILD["project"]["version"] == mpicomp.__version__
    assert "__version__" in dir(mpicomp)


def test_the_package_is_run_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mpicomp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mpicomp {mpicomp.__version__}\n"


def test_links_of_the_project_are_of_papers_that_the_docs_name() -> None:
    docs = "".join(path.read_text() for path in (PROJECT / "docs").glob("*.md"))
    for url in BUILD["project"]["urls"].values():
        assert f"arXiv {url.removeprefix('https://arxiv.org/abs/')}" in docs
