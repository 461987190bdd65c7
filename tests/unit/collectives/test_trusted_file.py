"""Files that another user may have written are not opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectives import trusted_file
from collectives.trusted_file import open_folder, open_trusted

NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "kernels"
    made.mkdir(mode=0o755)
    (made / "kernel").write_bytes(b"code")
    (made / "kernel").chmod(0o644)
    return made


def read(folder: Path, name: str = "kernel") -> bytes | None:
    """Return the content, or None where the file is refused."""
    try:
        with open_trusted(folder, name) as file:
            return file.read()
    except OSError:
        return None


def test_files_of_this_user_are_read_below_folders_of_others(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert read(folder) == b"code"
    assert read(folder, "none") is None


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_files_that_others_may_write_are_refused(folder: Path, mode: int) -> None:
    (folder / "kernel").chmod(mode)
    assert read(folder) is None


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_folders_that_others_may_write_to_are_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert read(folder) is None
    with pytest.raises(PermissionError, match="belongs to another user, or others may write to it"):
        open_folder(folder)


def test_links_are_refused(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "kernel")
    (folder.parent / "elsewhere").symlink_to(folder)
    assert read(folder, "link") is None
    assert read(folder.parent / "elsewhere") is None


def test_a_fifo_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "fifo", 0o600)
    assert read(folder, "fifo") in (None, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["kernels", "kernels/kernel"])
def test_only_this_user_root_and_the_owner_of_the_sources_are_trusted(
    folder: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = folder.parent / which
    os.chown(given, NOBODY, NOBODY)
    assert read(folder) is None
    os.chown(given, 1234, 1234)
    assert read(folder) is None
    monkeypatch.setattr(trusted_file, "_OWNERS", {1234})
    assert read(folder) == b"code"
    monkeypatch.setattr(trusted_file, "_OWNERS", set())
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert read(folder) == b"code"
