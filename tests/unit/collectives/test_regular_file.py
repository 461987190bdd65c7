"""Readers of users' files refuse FIFOs, devices, sockets and folders at once, and read nothing from them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.json_file import read_json
from collectives.regular_file import open_regular
from mpicomp.state.state_file import load_state


def make(kind: str, folder: Path) -> Path:
    path = folder / "file"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            before = Path.cwd()
            os.chdir(folder)  # the name of a socket is short
            one.bind("file")
            os.chdir(before)
    else:
        path.symlink_to("/dev/zero")
    return path


READERS: list[Callable[[Path], object]] = [open_regular, load_state, lambda path: read_json(path, "write it again")]


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "device"])
@pytest.mark.parametrize("read", READERS, ids=["open_regular", "load_state", "read_json"])
def test_other_files_are_refused_at_once(kind: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"it is a {kind}, not a regular file") as caught:
        read(make(kind, tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"content")
    (tmp_path / "link").symlink_to("data")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
