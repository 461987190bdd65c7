"""A launcher that goes on after its job is ended; others, and those that end by themselves, are left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from collectives.recovery.launcher_end import OF_ENDED_RANKS, command

PROJECT = Path(__file__).resolve().parents[4]
LATEST_S = 60.0
# Two ranks that end at once, and a launcher that goes on.
LAUNCHER = "trap '' {ignored}; {rank} & {rank} & wait; echo ended >&2; sleep 100; sleep 100"
RANK = "from collectives.recovery.launcher_end import watch_launcher; watch_launcher(8)"
pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd_open")


class Launchers:
    """Starts shells under the names of launchers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, name: str, *, ignored: str = "WINCH", env: Mapping[str, str], program: str = LAUNCHER
    ) -> subprocess.Popen[str]:
        shell = shutil.copy(shutil.which("bash") or "/bin/bash", self._folder / name)
        rank = f"{sys.executable} -c '{RANK}'"
        found = subprocess.Popen(
            [shell, "-c", program.format(ignored=ignored, rank=rank)], cwd=PROJECT, stderr=subprocess.PIPE, text=True,
            # longer than a busy machine takes from the end of the ranks to the line that the shell prints
            env=os.environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MPICOMP_END_LAUNCHER_AFTER": "1"} | dict(env),
            start_new_session=True,
        )  # fmt: skip
        self._started.append(found)
        assert found.stderr is not None
        assert found.stderr.readline() == "ended\n"
        return found

    def watchers(self) -> list[str]:
        """Return the processes left behind by ranks of the launchers."""
        pids = [f"{one.pid}:" for one in self._started]
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "launcher_end.py" in text and any(pid in text for pid in pids):
                    found.append(text)
        return found

    def end(self) -> None:
        for one in self._started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.communicate()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    started = Launchers(tmp_path)
    yield started
    started.end()


@pytest.mark.parametrize("name", ["prterun", "mpiexec.hydra"])
@pytest.mark.parametrize(("ignored", "number"), [("WINCH", signal.SIGTERM), ("TERM", signal.SIGKILL)])
def test_a_launcher_that_goes_on_is_ended(launchers: Launchers, name: str, ignored: str, number: int) -> None:
    found = launchers.start(name, ignored=ignored, env={})
    assert found.wait(LATEST_S) == -number


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("slurmstepd", {}),  # it may have other jobs
        ("prted", {"PMIX_NAMESPACE": "prte-node0-123@4"}),  # so may this one
        ("prterun", {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}),  # no link between ranks could be cut
        ("prterun", {"MPICOMP_END_LAUNCHER_AFTER": "0"}),
    ],
)
def test_other_launchers_go_on(launchers: Launchers, name: str, env: dict[str, str]) -> None:
    found = launchers.start(name, env=env)
    assert not launchers.watchers()
    assert found.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_cannot_keep_the_process_away(launchers: Launchers, tmp_path: Path) -> None:
    # it takes the names and locks of the launcher that it can, before the ranks come
    other = tmp_path / "other.py"
    other.write_text(
        """
import fcntl, os, socket, sys, time
from pathlib import Path
pid = int(sys.argv[1])
started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
space = Path("/proc/self/ns/pid").stat().st_ino
os.setuid(65534)
name = socket.socket(socket.AF_UNIX)
name.bind(f"\\0mpicomp-launcher-{space}-{pid}-{started}")
files = []
for file in ("environ", "stat", "cmdline"):
    try:
        files.append(open(f"/proc/{pid}/{file}"))
        fcntl.flock(files[-1], fcntl.LOCK_EX)
    except OSError:
        pass
print("taken", file=sys.stderr, flush=True)
os.close(1)
os.close(2)
time.sleep(1000)
"""
    )
    taken = f"{sys.executable} {other} $$ 2> {tmp_path}/taken & disown; "
    taken += f"until [ -s {tmp_path}/taken ]; do sleep 0.02; done; "
    assert launchers.start("prterun", env={}, program=taken + LAUNCHER).wait(LATEST_S) == -signal.SIGTERM


def test_one_rank_of_a_node_leaves_a_process_which_ends_with_the_launcher(launchers: Launchers) -> None:
    found = launchers.start("prterun", env={"MPICOMP_END_LAUNCHER_AFTER": "1000"})
    assert len(launchers.watchers()) == 1
    os.killpg(found.pid, signal.SIGKILL)
    deadline = time.monotonic() + LATEST_S
    while launchers.watchers():
        assert time.monotonic() < deadline
        time.sleep(0.02)


HANGS = "import subprocess, threading; subprocess.Popen(['sleep', '3']); lock = threading.Lock(); lock.acquire(); "


@pytest.mark.parametrize(("waits", "status"), [("lock.acquire()", -signal.SIGTERM), ("time.sleep(9)", 0)])
def test_a_launcher_whose_ranks_have_ended_is_ended_if_it_waits_for_a_lock_without_children(
    waits: str, status: int
) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", f"import time; {HANGS}{waits}"])
    start, end = time.monotonic(), os.pidfd_open(launcher.pid)
    watcher = subprocess.Popen(command(1, OF_ENDED_RANKS, [(launcher.pid, end)]), pass_fds=[end])
    os.close(end)
    assert launcher.wait(LATEST_S) == status
    assert time.monotonic() - start > 4
    assert watcher.wait(LATEST_S) == 0
