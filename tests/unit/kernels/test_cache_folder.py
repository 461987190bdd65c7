"""The cache of compiled kernels: fresh after any change, made once, and elsewhere where a place cannot be written."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numba import config

import mpicomp.kernels
from mpicomp.kernels import cache_folder
from mpicomp.kernels.cache_folder import KEPT_FOLDERS, NAME, CacheFolder

KERNELS = Path(mpicomp.kernels.__file__).parent
# A kernel, with a function of another file compiled in.
HELPER = "from numba import njit\n\n@njit(nogil=True)\ndef number():\n    return {number}\n"
KERNEL = """
from mpicomp.kernels.cpu.helper import number
from mpicomp.kernels.cpu.kernel import kernel

@kernel
def doubled():
    return 2 * number()
"""
PROGRAM = """
import sys
from mpicomp.kernels.cpu.probe import doubled
number = doubled()
print(number, sum(doubled.stats.cache_hits.values()))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Make an installation of the kernels' folder alone, with a small kernel in two files."""
    package = tmp_path / "install" / "mpicomp"
    cpu = package / "kernels" / "cpu"
    cpu.mkdir(parents=True)
    for name in ("__init__.py", "streams.py", "cache_folder.py", "cpu/__init__.py", "cpu/kernel.py"):
        shutil.copyfile(KERNELS / name, package / "kernels" / name)
    (package / "__init__.py").touch()
    (cpu / "helper.py").write_text(HELPER.format(number=1))
    (cpu / "probe.py").write_text(KERNEL)
    return tmp_path / "install"


def call(copy: Path, **env: str) -> tuple[int, int, str]:
    """Call the kernel in a new process; return its result, its hits in the cache, and its warnings."""
    clean = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=clean | {"HOME": str(copy / "home"), "PYTHONPATH": str(copy)} | env,
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result, hits = map(int, done.stdout.split())
    return result, hits, done.stderr


@pytest.mark.parametrize("place", ["NUMBA_CACHE_DIR", "beside the sources"])
def test_a_kernel_is_compiled_again_when_another_file_has_changed(copy: Path, place: str) -> None:
    env = {"NUMBA_CACHE_DIR": str(copy / "cache")} if place == "NUMBA_CACHE_DIR" else {}
    assert call(copy, **env) == (2, 0, "")
    assert call(copy, **env) == (2, 1, "")
    (copy / "mpicomp" / "kernels" / "cpu" / "helper.py").write_text(HELPER.format(number=5))
    assert call(copy, **env) == (10, 0, "")


def test_a_place_that_takes_nothing_is_read_all_the_same(copy: Path) -> None:
    call(copy)
    beside = copy / "mpicomp" / "kernels" / "cpu" / "__pycache__"
    (kept,) = beside.glob(f"{cache_folder._PREFIX}*")
    shutil.move(kept, copy / "kept")
    shutil.rmtree(beside)
    beside.write_text("no folder")
    assert call(copy) == (2, 0, "")
    assert call(copy) == (2, 1, ""), "kept in the user's cache"
    shutil.rmtree(copy / "home")
    (copy / "home").write_text("no folder")
    told = call(copy, TMPDIR=str(copy))[2]
    assert "takes no compiled kernels (Not a directory)" in told
    assert f"they are kept in {copy}/mpicomp-{os.getuid()}; set NUMBA_CACHE_DIR" in told
    assert call(copy, TMPDIR=str(copy)) == (2, 1, "")


def test_without_any_place_every_process_compiles(copy: Path) -> None:
    nowhere = str(copy / "mpicomp" / "__init__.py")
    own = copy / f"mpicomp-{os.getuid()}"
    own.mkdir(mode=0o700)
    (own / "x").touch()
    env = {"NUMBA_CACHE_DIR": nowhere, "TMPDIR": "/proc", "TEMP": "/proc", "TMP": "/proc"}
    program = f"import tempfile; tempfile.tempdir = '/proc/self'\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(copy)} | env, cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "0"], done.stderr
    assert done.stderr.count("every process compiles them again; set NUMBA_CACHE_DIR") == 1


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    """A cache below NUMBA_CACHE_DIR."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return CacheFolder()


def test_a_full_disk_is_named_once_and_left(
    cache: CacheFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cache_folder._write

    def full(file: Path, content: bytes) -> None:
        if file.is_relative_to(tmp_path / "cache"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    monkeypatch.setattr(cache_folder, "_write", full)
    with pytest.warns(RuntimeWarning, match=r"cache takes no compiled kernels \(No space left on device\)"):
        cache.write("a.nbc", b"a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write("b.nbc", b"b")
    assert (cache.read("a.nbc"), cache.read("b.nbc"), cache.count()) == (b"a", b"b", 2)


def test_temporary_files_that_others_may_write_to_are_not_trusted(
    cache: CacheFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("no folder")
    theirs = tmp_path / f"mpicomp-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="they are kept in"):
        cache.write("a.nbc", b"a")
    assert not list(theirs.iterdir())
    assert cache.read("a.nbc") == b"a"


def test_folders_of_the_latest_sources_are_kept_and_nothing_else_is_touched(cache: CacheFolder, tmp_path: Path) -> None:
    parent = tmp_path / "cache"
    stale = [parent / f"{cache_folder._PREFIX}{number:020x}" for number in range(KEPT_FOLDERS + 4)]
    for age, folder in enumerate(stale):
        folder.mkdir(parents=True)
        (folder / "kernel.nbc").touch()
        os.utime(folder, (1e9 - age, 1e9 - age))
    (parent / "mpicomp-kernels-notes").mkdir()
    cache.write("a.nbc", b"a")
    assert [folder.exists() for folder in stale] == [True] * KEPT_FOLDERS + [False] * 4
    assert (parent / "mpicomp-kernels-notes").exists()


def test_a_folder_that_is_cleared_meanwhile_is_made_again(cache: CacheFolder, tmp_path: Path) -> None:
    cache.write("a.nbc", b"a")
    shutil.rmtree(tmp_path / "cache")
    cache.write("b.nbc", b"b")
    assert (cache.read("a.nbc"), cache.read("b.nbc")) == (None, b"b")


def test_a_file_that_was_cut_off_is_made_again(copy: Path) -> None:
    env = {"NUMBA_CACHE_DIR": str(copy / "cache")}
    call(copy, **env)
    (file,) = (copy / "cache").glob("*/*.nbc")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert call(copy, **env) == (2, 0, "")
    assert call(copy, **env) == (2, 1, "")


# One at a time ---------------------------------------------------------------------------------------------------

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(cache: CacheFolder) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that compiles a kernel."""
    folder = cache.to_write()
    assert folder is not None
    command = [sys.executable, "-c", HOLDER, str(folder / "k.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_who_waits_goes_on_when_the_other_is_killed(cache: CacheFolder, holder: subprocess.Popen[bytes]) -> None:
    entered = threading.Event()

    def wait() -> None:
        with cache.only_one("k", lambda: False):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.2)
    holder.kill()
    assert entered.wait(10)
    thread.join()


def test_who_waits_goes_on_when_the_kernel_is_there(cache: CacheFolder, holder: subprocess.Popen[bytes]) -> None:
    cache.write("k.nbc", b"")
    with cache.only_one("k", lambda: cache.has("k.nbc")):
        assert holder.poll() is None


def test_nobody_waits_for_ever_for_a_process_that_stands_still(
    cache: CacheFolder, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "LONGEST_WAIT_S", 0.1)
    holder.send_signal(signal.SIGSTOP)
    with pytest.warns(RuntimeWarning, match="another process has compiled a kernel"), cache.only_one("k", bool):
        pass
    monkeypatch.setattr(cache_folder, "LONGEST_WAIT_S", 60.0)
    with cache.only_one("k", bool):  # this process has learned that waiting is in vain
        pass


def test_of_threads_and_processes_one_at_a_time_is_inside(cache: CacheFolder) -> None:
    inside, most = [], []

    def enter() -> None:
        with cache.only_one("k", bool):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_an_error_of_the_compiler_frees_the_lock(cache: CacheFolder) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), cache.only_one("k", bool):
            raise KeyError("typing")


def test_where_a_file_system_has_no_locks_everyone_compiles(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache_folder.fcntl, "flock", refuse)
    with cache.only_one("k", bool):
        pass
    assert cache.to_write() is not None
    assert cache.places[0].name == NAME


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("given", ["", "*", "*/*.nbc"])
def test_pickles_of_another_user_are_not_executed(copy: Path, given: str) -> None:
    env = {"NUMBA_CACHE_DIR": str(copy / "cache"), "TMPDIR": str(copy)}
    call(copy, **env)
    (kernel,) = (copy / "cache").glob("*/*.nbc")
    attack = subprocess.list2cmdline(["touch", str(copy / "executed")])
    kernel.write_bytes(pickle.dumps(Attack(attack)))
    assert call(copy, **env)[1] == 0
    assert (copy / "executed").exists(), "files of this user are"
    (copy / "executed").unlink()
    kernel.write_bytes(pickle.dumps(Attack(attack)))
    for path in [copy / "cache"] if not given else (copy / "cache").glob(given):
        os.chown(path, 65534, 65534)
    if not given:  # the owner of the folder above can exchange the one with the kernels
        shutil.copytree(kernel.parent, copy / "other")
        shutil.rmtree(kernel.parent)
        shutil.move(copy / "other", kernel.parent)
        for path in (kernel.parent, *kernel.parent.iterdir()):
            os.chown(path, 65534, 65534)
    assert call(copy, **env)[:2] == (2, 0)
    assert not (copy / "executed").exists()
    assert call(copy, **env)[:2] == (2, 1), "kept elsewhere, or in place of the other's file"
    assert not (copy / "executed").exists()


def test_folders_of_kernels_are_not_writable_by_others_under_any_umask(copy: Path) -> None:
    before = os.umask(0)
    try:
        call(copy, NUMBA_CACHE_DIR=str(copy / "cache"))
        assert call(copy, NUMBA_CACHE_DIR=str(copy / "cache")) == (2, 1, "")
    finally:
        os.umask(before)
    (folder,) = (copy / "cache").glob("*")
    assert not folder.stat().st_mode & 0o022


class Attack:
    """Object whose pickle runs a command where it is read."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)
