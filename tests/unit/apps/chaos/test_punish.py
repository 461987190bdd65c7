"""The punisher kills ranks of its job and nothing else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from apps.chaos.__main__ import main
from apps.chaos.punish import punish, ranks_of_job

JOB = f"test-{os.getpid()}"
RANK = "import subprocess, sys; print('started', flush=True); subprocess.run(['sleep', '600'])"


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start three processes that look like ranks, each with a worker, and one of another job."""
    with contextlib.ExitStack() as stack:
        started = []
        for job, rank in [(JOB, 0), (JOB, 1), (JOB, 2), (f"{JOB}0", 0)]:
            env = os.environ | {"SLURM_JOB_ID": job, "PMIX_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", RANK], env=env, stdout=subprocess.PIPE, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, 9)
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            assert process.stdout.readline() == b"started\n"
            started.append(process)
        yield started


def test_random_ranks_are_killed_and_one_is_spared(ranks: list[subprocess.Popen[bytes]]) -> None:
    assert ranks_of_job(JOB) == {process.pid: rank for rank, process in enumerate(ranks[:3])}
    killed: list[int] = []
    assert punish(JOB, 1e-3, 1, 2, lambda rank, pid: killed.append(rank)) == 2
    for rank in killed:
        assert ranks[rank].wait() == -9
    assert len(set(killed)) == 2
    assert [process.poll() for process in ranks].count(None) == 2
    assert ranks[3].poll() is None  # of another job


def test_it_ends_with_its_job() -> None:
    assert main(["punish", "--job", f"{JOB}-ended", "--mean-seconds", "1000"]) == 0


def test_it_needs_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["punish"]) == 2
    assert capsys.readouterr().err == "error: --job is missing, and SLURM_JOB_ID is not set\n"
