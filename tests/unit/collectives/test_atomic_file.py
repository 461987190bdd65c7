"""Files that are complete or absent, and remains of killed processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from collectives import atomic_file
from collectives.atomic_file import flushed, replacing

PROJECT = Path(__file__).resolve().parents[3]
WRITER = """
import sys
from pathlib import Path
from collectives.atomic_file import replacing

with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
    file.write(b", whole")
"""


@contextmanager
def writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing a file."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=PROJECT, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            yield process
        finally:
            process.kill()


def killed_while_writing(path: Path) -> int:
    with writing(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return process.pid


def replace(path: Path, content: bytes = b"new") -> None:
    with replacing(path) as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_what_a_killed_process_leaves_is_removed_by_the_next_write_of_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    replace(path, b"old")
    killed_while_writing(path)
    killed_while_writing(tmp_path / "other.npz")
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) == 3
    replace(path)
    assert path.read_bytes() == b"new"
    (left,) = set(names(tmp_path)) - {"state.npz"}
    assert left.startswith(".other.npz.")


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with writing(path) as process:
        replace(path)
        assert path.read_bytes() == b"new"
        assert len(names(tmp_path)) == 2
        process.communicate("\n")
        assert process.returncode == 0
    assert path.read_bytes() == b"half, whole"
    assert names(tmp_path) == ["state"]


def test_without_locks_process_numbers_of_this_host_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    path = tmp_path / "state"
    dead = killed_while_writing(path)
    assert len(names(tmp_path)) == 1
    replace(path)
    assert names(tmp_path) == ["state"]
    foreign = f".state.01234567-{dead}-89abcdef.partial"
    with writing(tmp_path / "state") as process:
        (tmp_path / foreign).touch()
        replace(path)
        assert len(names(tmp_path)) == 3
        process.communicate("\n")
    assert names(tmp_path) == [foreign, "state"]


def test_threads_that_write_one_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    path = tmp_path / "state"
    contents = [bytes([number]) * 100_000 for number in range(16)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(replace, [path] * 16, contents))
    assert path.read_bytes() in contents
    assert names(tmp_path) == ["state"]


def test_what_a_killed_process_left_is_locked_while_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".state.99999999.partial"
    left.touch()
    remove, locked = Path.unlink, []

    def look_and_remove(path: Path, missing_ok: bool = False) -> None:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(path)
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", look_and_remove)
    replace(tmp_path / "state")
    assert locked == [left]
    assert names(tmp_path) == ["state"]


def test_a_file_found_before_it_was_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    locked = fcntl.flock
    removed = []

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    replace(path)
    assert path.read_bytes() == b"new"
    assert len(removed) == 1


def test_a_new_file_follows_no_link_and_takes_no_files_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    link = tmp_path / "link"
    link.symlink_to(target)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    for path in (target, link, dangling):
        with pytest.raises(OSError, match=f"exists: '{path}'"), flushed(path) as file:
            file.write(b"new")
    assert target.read_bytes() == b"kept"
    assert not (tmp_path / "nothing").exists()
    # the names of partial files cannot be guessed; where one could be, a link there would not be followed
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: "89abcdef")
    planted = tmp_path / f".state.{atomic_file._host()}-{os.getpid()}-89abcdef.partial"
    planted.symlink_to(target)
    with pytest.raises(FileExistsError):
        replace(tmp_path / "state")
    assert target.read_bytes() == b"kept"


def test_of_names_that_look_alike_only_those_of_its_own_partial_files_are_removed(tmp_path: Path) -> None:
    """Also another host's, whose process numbers say nothing here, and an earlier version's."""
    others = [".state.npz.1.partial", ".state.x.partial", ".state..partial", ".state.1.partial.txt", "state.1.partial"]
    own = [f".state.01234567-{os.getpid()}-89abcdef.partial", f".state.{os.getpid()}.partial"]
    for name in (*others, *own):
        (tmp_path / name).touch()
    (tmp_path / ".state.1.partial").mkdir()
    replace(tmp_path / "state")
    assert names(tmp_path) == sorted([*others, ".state.1.partial", "state"])


def test_a_block_that_fails_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    replace(path, b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["state"]
    with pytest.raises(FileNotFoundError, match=r"none/\.state"):
        replace(tmp_path / "none" / "state")


def test_an_error_of_the_disk_is_raised_though_the_writer_hides_it_behind_another(tmp_path: Path) -> None:
    """`torch.save` ends its archive on the full disk, and fails again."""

    def write() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "state"):
        write()
    assert Path(caught.value.filename).parent == tmp_path
    assert not any(tmp_path.iterdir())


def test_an_error_that_the_caller_handles_does_not_take_the_place_of_the_writers(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("of the writer")

    try:
        raise OSError("earlier")
    except OSError:
        with pytest.raises(RuntimeError, match="of the writer"), replacing(tmp_path / "state"):
            fail()
