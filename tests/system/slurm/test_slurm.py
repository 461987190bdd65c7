"""The batch scripts, in jobs of a real Slurm on two nodes: their results when all goes well, and after failures."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.slurm.cluster import SlurmCluster
from tests.system.slurm.job import Job

pytestmark = pytest.mark.timeout(1800)
EPOCHS = 20  # six seconds and more: a test that is late must find the ranks at work still
TRAINING = ("--dataset", "digits", "--batch", "4", "--epochs", str(EPOCHS))
PER_NODE = "--ntasks-per-node=1"
SAVED = re.compile(r"stopped by a signal after step (\d+); continue with --resume")


def lines(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / "run.json").read_text().splitlines()]


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints: a folder without its manifest is not complete."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/manifest.json"))


def learned(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the parts of a record that depend neither on the speed of a run nor on the time of an interruption."""
    fields = ("kind", "epoch", "ranks", "loss", "accuracy", "test_loss", "parameters_sha256", "bytes_so_far_per_rank")
    return [tuple(record.get(field) for field in fields) for record in records]


def train(cluster: SlurmCluster, *arguments: str, options: tuple[str, ...] = ()) -> Job:
    return cluster.submit("train", PER_NODE, *options, arguments=(*TRAINING, *arguments))


def in_training(job: Job) -> Job:
    """Wait for the second epoch, and hold the ranks there."""
    job.said("epoch   2/")
    job.hold()
    return job


def require_resumed(later: Job, job: Job, step: int) -> None:
    """Check that another job goes on from a checkpoint, to its end."""
    assert later.end().state == "COMPLETED", later.output
    assert f"resumed from runs/{job.folder.name}/step-{step:08d}" in later.output


def require_went_on(job: Job, uninterrupted: Job) -> None:
    """Check that a requeued job has learned the model of a job without an interruption."""
    record = job.end()
    assert (record.state, record.exit_code, record.restarts) == ("COMPLETED", "0:0", 1), job.output
    assert job.output.count("resumed from") == 1
    assert learned(lines(job)) == learned(lines(uninterrupted))


@pytest.fixture(scope="session")
def uninterrupted(cluster: SlurmCluster) -> Job:
    """A training that nothing happens to."""
    job = train(cluster)
    job.end()
    return job


@pytest.fixture(scope="session")
def pmix(cluster: SlurmCluster) -> None:
    refused = cluster.refusal("srun", "--mpi=pmix", "true")
    if refused is not None:
        pytest.skip(f"srun cannot start MPI ranks (on Debian: apt-get install libpmix-dev): {refused}")


def test_a_benchmark_runs_on_both_nodes(cluster: SlurmCluster) -> None:
    job = cluster.submit("bench", arguments=("--algorithm", "marsit", "--count", "1e5", "--baseline", "mpi"))
    record = job.end()
    assert (record.state, record.exit_code) == ("COMPLETED", "0:0"), job.output
    assert "ranks: 1 on n1, 1 on n2" in job.output
    assert "2 ranks on 2 hosts" in job.output
    assert re.search(r"^ +400000 +100000 .* ok$", job.output, re.MULTILINE), job.output
    line = json.loads((cluster.project / "runs" / f"bench-{job.id}.json").read_text())
    assert (line["algorithm"], line["count"], line["ranks"]) == ("marsit", 100_000, 2)


PROGRAM = """
import os
import platform
import time
from pathlib import Path

import mpicomp

with mpicomp.Communicator() as comm:
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"rank {comm.rank} is on {platform.node()} with {threads} threads", flush=True)
    saved = Path("saved")
    if comm.allreduce(saved.exists(), "max"):
        print("resumed", flush=True)
    else:
        while not comm.stop_requested():
            time.sleep(0.05)
        comm.barrier()
        saved.touch()
        print("stopped", flush=True)
"""


def require_program_stops_and_resumes(cluster: SlurmCluster) -> None:
    """Run a program by ``slurm/run.sbatch``: on both nodes with both cores of each, until a signal, and again."""
    (cluster.project / "saved").unlink(missing_ok=True)
    (cluster.project / "program.py").write_text(PROGRAM)
    job = cluster.submit("run", PER_NODE, "--cpus-per-task=2", arguments=("program.py",))
    job.said("is on", times=2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    record = job.end()
    assert (record.state, record.exit_code, record.restarts) == ("COMPLETED", "0:0", 1), job.output
    for number, node in enumerate(("n1", "n2")):
        assert job.output.count(f"mpicomp run: {node}: rank {number}, 2 cores") == 2, job.output
        assert job.output.count(f"rank {number} is on {node} with 2 threads") == 2, job.output
    assert "SIGUSR1: asking the ranks to stop" in job.output
    assert (job.output.count("stopped"), job.output.count("resumed")) == (2, 2), job.output


def test_a_program_of_a_user_stops_and_goes_on(cluster: SlurmCluster) -> None:
    require_program_stops_and_resumes(cluster)


@pytest.mark.usefixtures("pmix")
def test_a_program_of_a_user_stops_and_goes_on_under_srun(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cluster.env, "MPICOMP_LAUNCHER", "srun --mpi=pmix")
    require_program_stops_and_resumes(cluster)


@pytest.mark.parametrize("name", ["run", "train", "bench"])
def test_slurm_accepts_the_options_of_the_scripts(cluster: SlurmCluster, name: str) -> None:
    options = ["--ntasks-per-node=1"] if name == "train" else []
    assert cluster.refusal("sbatch", "--test-only", *options, str(cluster.project / f"slurm/{name}.sbatch")) is None


def test_srun_without_pmix_is_refused_and_a_program_alone_in_its_allocation_is_not(cluster: SlurmCluster) -> None:
    program = (sys.executable, "-c", "import mpicomp; mpicomp.Communicator().close()")
    refused = cluster.refusal("srun", "-n", "2", *program)
    assert refused is not None
    assert "srun started 2 processes (SLURM_STEP_NUM_TASKS=2), but each is alone" in refused
    assert cluster.refusal("salloc", "-n", "4", *program) is None
    assert cluster.refusal("srun", "-n", "1", *program) is None


def test_a_training_runs_to_its_end(uninterrupted: Job) -> None:
    job = uninterrupted
    assert (job.record.state, job.record.exit_code) == ("COMPLETED", "0:0"), job.output
    assert "ranks: 1 on n1, 1 on n2" in job.output
    assert [line["kind"] for line in lines(job)] == ["epoch"] * EPOCHS + ["result"]
    assert lines(job)[-1]["ranks"] == 2
    assert checkpoints(job.folder)[-1] == lines(job)[-1]["steps"]


def test_what_fails_fails_the_job(cluster: SlurmCluster) -> None:
    job = train(cluster, "--momentum", "much")
    record = job.end()
    assert (record.state, record.exit_code, record.restarts) == ("FAILED", "2:0", 0), job.output
    assert "argument --momentum: " in job.output


def test_who_asks_the_script_to_stop_can_go_on_in_another_job(
    cluster: SlurmCluster, uninterrupted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = in_training(train(cluster, "--checkpoint-every", "1000"))
    cluster.run("scancel", "--batch", "--signal=TERM", job.id)
    job.said("SIGTERM: asking the ranks for a checkpoint")
    job.go_on()
    record = job.end()
    assert (record.state, record.exit_code, record.restarts) == ("COMPLETED", "0:0", 0), job.output
    saved = SAVED.search(job.output)
    assert saved, job.output
    assert checkpoints(job.folder) == [int(saved[1])]

    monkeypatch.setitem(cluster.env, "MPICOMP_RUN", f"runs/{job.folder.name}")
    later = train(cluster, "--checkpoint-every", "1000")
    require_resumed(later, job, int(saved[1]))
    assert learned(lines(job)) == learned(lines(uninterrupted))


def test_a_cancelled_job_stays_cancelled_and_another_goes_on_from_its_newest_checkpoint(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = in_training(train(cluster, "--checkpoint-every", "300steps"))
    before = checkpoints(job.folder)
    assert before
    cluster.run("scancel", job.id)
    record = job.end()
    # the script ends by itself, with any exit status of mpirun; the step that is mpirun's daemon by SIGTERM
    assert (record.state, record.steps, record.restarts) == ("CANCELLED", "0:15", 0), job.output
    assert record.exit_code in ("0:0", "1:0"), job.output
    after = checkpoints(job.folder)
    assert after[-1] >= before[-1]  # whether one more was in time is left to chance

    monkeypatch.setitem(cluster.env, "MPICOMP_RUN", f"runs/{job.folder.name}")
    require_resumed(train(cluster, "--checkpoint-every", "300steps", "--epochs", "3"), job, after[-1])


@pytest.mark.usefixtures("pmix")
def test_under_srun_a_requeued_and_a_cancelled_job_save_first(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cluster.env, "MPICOMP_LAUNCHER", "srun --mpi=pmix")
    job = in_training(train(cluster, "--checkpoint-every", "1000"))
    cluster.run("scontrol", "requeue", job.id)
    job.said("resumed from")
    job.hold()
    saved = checkpoints(job.folder)
    assert saved == [int(step) for step in SAVED.findall(job.output)], job.output
    assert f"resumed from runs/{job.folder.name}/step-{saved[0]:08d}" in job.output
    cluster.run("scancel", job.id)
    record = job.end()
    ended = record.state, record.exit_code, record.steps, record.restarts
    assert ended == ("CANCELLED", "0:0", "0:0", 1), job.output
    after = checkpoints(job.folder)
    assert after == [int(step) for step in SAVED.findall(job.output)], job.output
    assert len(after) == len(saved) + 1 == 2


def test_a_job_that_reaches_its_time_limit_goes_on_in_the_queue(cluster: SlurmCluster, uninterrupted: Job) -> None:
    # Ten minutes before its limit is at once where the limit is ten minutes; Slurm looks at its clocks twice a minute.
    job = in_training(train(cluster, "--checkpoint-every", "1000", options=("--time=60", "--signal=B:USR1@600")))
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=10")
    job.said("SIGUSR1: asking the ranks for a checkpoint")
    job.go_on()
    job.wait_for(lambda: job.record.restarts == 1, "gone back into the queue")
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    require_went_on(job, uninterrupted)
    saved = SAVED.search(job.output)
    assert saved, job.output
    assert f"resumed from runs/{job.folder.name}/step-{int(saved[1]):08d}" in job.output


def test_a_requeued_job_goes_on(cluster: SlurmCluster, uninterrupted: Job) -> None:
    job = in_training(train(cluster))
    cluster.run("scontrol", "requeue", job.id)
    require_went_on(job, uninterrupted)


@pytest.mark.skipif(
    not os.environ.get("MPICOMP_TEST_DEAD_NODES"), reason="it takes minutes; MPICOMP_TEST_DEAD_NODES=1 tries it"
)
def test_a_job_whose_node_dies_goes_on(cluster: SlurmCluster, uninterrupted: Job) -> None:
    job = in_training(train(cluster))
    with cluster.crashed("n2"):
        job.said("a node of the job does not answer: back into the queue")
    require_went_on(job, uninterrupted)
