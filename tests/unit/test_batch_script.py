"""``slurm/train.sbatch`` with stand-ins for the launcher and Slurm: when it goes back into the queue."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

PROJECT = Path(__file__).resolve().parents[2]
LAUNCHER = """#!/usr/bin/env bash
if [[ $2 == doctor ]]; then eval "$DOCTOR"; else eval "$TRAIN"; fi
"""
SRUN = """#!/bin/sh
[ "$1" = daemon ] || exit "$SRUN_STATUS"
echo $$ >"$2.part" && mv "$2.part" "$2"
while :; do sleep 0.1; done
"""
SIGNAL = "kill -USR1 $PPID"
NOTHING = "true"
SAVE = "mkdir -p runs/x/step-00000002; echo {} >runs/x/step-00000002/manifest.json"
FINISH = """echo '{"kind": "result"}' >runs/x/run.json"""
# trains until the signal comes back
STOPPED = f"trap 'stopped=yes' USR1; {SIGNAL}; until [[ ${{stopped:-}} ]]; do sleep 0.01; done"


class Outcome(NamedTuple):
    """Return the exit status, whether the job was requeued, and the output."""

    status: int
    requeued: bool
    output: str


def submit(folder: Path, doctor: str, train: str, restarts: int = 0, srun_status: int = 0) -> Outcome:
    """Run the script in a folder of its own, as the job's first node would."""
    programs = {"launcher": LAUNCHER, "srun": SRUN, "scontrol": "#!/bin/sh\ntouch requeued\n"}
    (folder / "slurm").symlink_to(PROJECT / "slurm")
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    told = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(folder), "SLURM_RESTART_COUNT": str(restarts)}
    told |= {"SRUN_STATUS": str(srun_status)}
    told |= {"MPICOMP_LAUNCHER": str(folder / "bin" / "launcher"), "MPICOMP_RUN": "runs/x", "MPICOMP_VENV": "none"}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "slurm/train.sbatch"],
        cwd=folder, env=os.environ | told | {"PATH": path, "DOCTOR": doctor, "TRAIN": train},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50, check=False,
        start_new_session=True,  # as Slurm does
    )  # fmt: skip
    return Outcome(done.returncode, (folder / "requeued").exists(), done.stdout)


@pytest.mark.parametrize(("restarts", "status"), [(9, 0), (10, 1)])
def test_who_is_never_done_with_starting_is_not_requeued_for_ever(tmp_path: Path, restarts: int, status: int) -> None:
    done = submit(tmp_path, SIGNAL, NOTHING, restarts)
    assert (done.status, done.requeued) == (status, not status), done.output
    assert ("the time limit may be too short" in done.output) == bool(status)


@pytest.mark.parametrize(("train", "requeued"), [(f"{STOPPED}; {SAVE}", True), (STOPPED, False)])
def test_who_saves_is_requeued_as_often_as_need_be(tmp_path: Path, train: str, requeued: bool) -> None:
    (tmp_path / "runs/x/step-00000001").mkdir(parents=True)
    (tmp_path / "runs/x/step-00000001/manifest.json").touch()  # an earlier one proves nothing
    done = submit(tmp_path, NOTHING, train, restarts=20)
    assert (done.status, done.requeued) == (not requeued, requeued), done.output


@pytest.mark.parametrize(("train", "status"), [(FINISH, 0), (NOTHING, 1)])
def test_the_end_of_an_earlier_run_is_no_success(tmp_path: Path, train: str, status: int) -> None:
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/run.json").write_text('{"kind": "result"}\n')
    done = submit(tmp_path, NOTHING, train)
    assert (done.status, done.requeued) == (status, False), done.output
    assert ("before the training was at its end" in done.output) == bool(status)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_no_launcher_of_a_daemon_on_a_dead_node_outlives_the_start(tmp_path: Path) -> None:
    left = f"srun daemon {tmp_path}/left >/dev/null 2>&1 & until [[ -e {tmp_path}/left ]]; do sleep 0.01; done; exit 1"
    other = tmp_path / "srun"  # of another session
    other.write_text(SRUN)
    other.chmod(0o755)
    with subprocess.Popen([other, "daemon", tmp_path / "other"], start_new_session=True) as outside:
        try:
            done = submit(tmp_path, NOTHING, left, srun_status=1)
            assert (done.status, done.requeued) == (1, True), done.output
            assert "does not answer" in done.output
            deadline = time.monotonic() + 20
            while not ended(int((tmp_path / "left").read_text())):
                assert time.monotonic() < deadline, "it is left behind"
                time.sleep(0.05)
            assert outside.poll() is None
        finally:
            outside.kill()
            pid = int((tmp_path / "left").read_text())
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)


def test_who_fails_on_nodes_that_answer_is_not_requeued(tmp_path: Path) -> None:
    done = submit(tmp_path, NOTHING, "exit 3")
    assert (done.status, done.requeued) == (3, False), done.output
