"""Compiled kernels are kept as long as no source of theirs changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copyfile

import pytest

from mpicomp.kernels import cpu
from mpicomp.kernels.cpu import drop_stale


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index of Numba's in a folder with two sources, of which the stamp is written."""
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("pass\n")
    drop_stale(tmp_path)
    index = tmp_path / "__pycache__" / "one.kernel-7.py311.nbi"
    index.write_bytes(b"kept")
    return index


def test_what_is_compiled_is_kept_while_no_source_changes(index: Path, tmp_path: Path) -> None:
    drop_stale(tmp_path)
    assert index.exists()


@pytest.mark.parametrize("change", ["another file", "a new file", "a file less"])
def test_what_is_compiled_is_dropped_when_any_source_changes(index: Path, tmp_path: Path, change: str) -> None:
    if change == "another file":
        (tmp_path / "two.py").write_text("pass  # changed\n")
    elif change == "a new file":
        (tmp_path / "three.py").write_text("pass\n")
    else:
        (tmp_path / "two.py").unlink()
    drop_stale(tmp_path)
    assert not index.exists()
    index.write_bytes(b"kept")
    drop_stale(tmp_path)
    assert index.exists()
    assert sorted(file.name for file in index.parent.iterdir()) == [index.name, "sources.txt"]


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    (tmp_path / "__pycache__").write_text("no folder")
    drop_stale(tmp_path)
    assert (tmp_path / "__pycache__").read_text() == "no folder"


def test_the_folder_of_the_kernels_does_so_when_it_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    copyfile(cpu.__file__, package / "__init__.py")
    subprocess.run([sys.executable, "-c", "import kernels"], cwd=tmp_path, check=True)
    assert "__init__.py" in (package / "__pycache__" / "sources.txt").read_text()
