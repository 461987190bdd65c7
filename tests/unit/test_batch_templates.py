"""Templates for jobs of a user's own program: their options, and the commands that they run."""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.documents import PROJECT

TEMPLATES = {"pbs": PROJECT / "batch/run.pbs", "lsf": PROJECT / "batch/run.lsf", "slurm": PROJECT / "slurm/run.sbatch"}
MPICOMP = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>called
eval "$JOB"
"""
# Options of qsub and bsub that stand alone, and those with a value.
ALONE = {"#PBS": {"-I", "-V", "-X", "-z"}, "#BSUB": {"-r", "-rn", "-x", "-H", "-B", "-N", "-K"}}
VALUED = {
    "#PBS": {"-A", "-a", "-e", "-J", "-j", "-l", "-M", "-m", "-N", "-o", "-p", "-q", "-r", "-S", "-v", "-W"},
    "#BSUB": {"-J", "-P", "-q", "-n", "-R", "-W", "-o", "-e", "-oo", "-eo", "-M", "-wa", "-wt", "-gpu", "-m", "-cwd"},
}


class Outcome(NamedTuple):
    """Exit status, output, and the arguments of each call of ``mpicomp``."""

    status: int
    output: str
    called: list[str]
    requeued: bool


def submit(kind: str, folder: Path, *arguments: str, job: str = "true", **environ: str) -> Outcome:
    """Run a template as the job's first host would, with stand-ins for ``mpicomp`` and ``scontrol``."""
    for name, text in {"mpicomp": MPICOMP, "scontrol": "#!/bin/sh\ntouch requeued\n"}.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(folder), "PBS_O_WORKDIR": str(folder), "SLURM_JOB_ID": "7", "JOB": job}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MPICOMP_", "SLURM_", "PROGRAM"))}
    done = subprocess.run(
        ["bash", str(TEMPLATES[kind]), *arguments], cwd=folder,
        env=kept | variables | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50, check=False,
        start_new_session=True,
    )  # fmt: skip
    called = (folder / "called").read_text().splitlines() if (folder / "called").exists() else []
    return Outcome(done.returncode, done.stdout, called, (folder / "requeued").exists())


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_starts_the_users_program_and_ends_with_its_status(kind: str, tmp_path: Path) -> None:
    arguments = ("train.py", "--epochs", "3") if kind == "slurm" else ()
    done = submit(kind, tmp_path, *arguments, job="exit 3", PROGRAM="train.py --epochs 3")
    assert done.called == ["run", "train.py", "--epochs", "3"]
    assert (done.status, done.requeued) == (3, False), done.output


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_without_a_program_names_the_cure(kind: str, tmp_path: Path) -> None:
    done = submit(kind, tmp_path)
    assert done.status != 0
    assert "name a program: " in done.output
    assert done.called == []


@pytest.mark.parametrize("kind", TEMPLATES)
def test_an_environment_can_be_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/mpicomp").write_text("#!/bin/sh\necho own\n")
    (tmp_path / "env/bin/mpicomp").chmod(0o755)
    done = submit(kind, tmp_path, "train.py", PROGRAM="train.py", MPICOMP_VENV=str(tmp_path / "env"))
    assert done.output == "own\n"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["pbs", "lsf"])
@pytest.mark.parametrize("slots", [1, 2])  # one of them is not the number of cores, which ranks without hosts would get
def test_ranks_fill_the_slots_that_the_batch_system_names(kind: str, slots: int, tmp_path: Path) -> None:
    """Run on the only host there is."""
    here = platform.node()
    (tmp_path / "nodes").write_text(f"{here}\n" * slots)
    (tmp_path / "program.py").write_text("from mpi4py import MPI; print('one of', MPI.COMM_WORLD.size)")
    variables = {
        "pbs": {"PBS_NODEFILE": f"{tmp_path}/nodes", "PBS_JOBID": "1.server", "PBS_O_WORKDIR": str(tmp_path)},
        "lsf": {"LSB_MCPU_HOSTS": f"{here} {slots}", "LSB_DJOB_HOSTFILE": f"{tmp_path}/nodes"},
    }
    ours = ("MPICOMP_", "OMPI_", "OMP_", "PRTE_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environ = kept | variables[kind] | {"PROGRAM": "program.py", "MPICOMP_VENV": sys.prefix}
    done = subprocess.run(
        ["bash", str(TEMPLATES[kind])], cwd=tmp_path, env=environ | {"PYTHONPATH": str(PROJECT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"one of {slots}") == slots
    assert f"mpicomp run: {here}: {'rank 0,' if slots == 1 else 'ranks 0 to 1'}" in done.stderr


# Slurm ----------------------------------------------------------------------------------------------------------------


NOTIFIED = "trap 'stopped=yes' USR1; kill -{0} $PPID; until [[ ${{stopped:-}} ]]; do sleep 0.01; done"


@pytest.mark.parametrize(
    ("sign", "end", "restarts", "expected"),
    [
        ("USR1", "", 0, (0, True)),
        ("TERM", "", 0, (0, False)),
        ("USR1", "; exit 4", 0, (4, False)),
        ("USR1", "", 100, (1, False)),
    ],
)
def test_a_job_that_stopped_before_its_time_limit_goes_back_into_the_queue(
    sign: str, end: str, restarts: int, expected: tuple[int, bool], tmp_path: Path
) -> None:
    job = NOTIFIED.format(sign) + end
    done = submit("slurm", tmp_path, "train.py", job=job, SLURM_RESTART_COUNT=str(restarts))
    assert f"SIG{sign}: asking the ranks to stop" in done.output
    assert (done.status, done.requeued) == expected, done.output


def test_a_program_without_a_handler_fails_its_job(tmp_path: Path) -> None:
    done = submit("slurm", tmp_path, "train.py", job="kill -USR1 $PPID; exec sleep 30")
    assert (done.status, done.requeued) == (128 + signal.SIGUSR1, False), done.output


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pbs", "lsf"])
def test_options_of_the_template_are_those_of_its_batch_system(kind: str) -> None:
    mark = {"pbs": "#PBS", "lsf": "#BSUB"}[kind]
    lines = TEMPLATES[kind].read_text().splitlines()
    found = [shlex.split(line.removeprefix(mark)) for line in lines if line.startswith(mark)]
    assert len(found) > 4
    for words in found:
        assert (words[0] in ALONE[mark]) if len(words) == 1 else (words[0] in VALUED[mark] and len(words) == 2), words
    # batch systems stop looking for options at the first command
    assert not any(line.startswith(mark) for line in lines[lines.index("set -euo pipefail") :])


def test_pbs_gets_the_cores_that_its_ranks_and_threads_need() -> None:
    (chunk,) = re.findall(r"select=\d+:(\S+)", TEMPLATES["pbs"].read_text())
    numbers = {key: int(value) for key, value in (part.split("=") for part in chunk.split(":"))}
    assert numbers["ncpus"] == numbers["mpiprocs"] * numbers["ompthreads"]


# Kubernetes -----------------------------------------------------------------------------------------------------------


def field_of(kind: type | dict[str, Any] | set[str], value: object, path: str) -> None:
    """Check a value against a type, the fields of an object, or a choice of texts; ``!`` marks a required field."""
    if isinstance(kind, set):
        assert value in kind, path
    elif isinstance(kind, dict):
        assert isinstance(value, dict), path
        assert {key.rstrip("!") for key in kind if key.endswith("!")} <= set(value), path
        known = {key.rstrip("!"): inner for key, inner in kind.items()}
        for key, inner in value.items():
            assert key in known, f"{path}.{key}"
            field_of(known[key], inner, f"{path}.{key}")
    else:
        assert isinstance(value, kind), path


CONTAINER = {"name!": str, "image!": str, "securityContext": {"runAsUser": int}, "command": list, "args": list,
             "env": list, "resources": {"limits": dict}}  # fmt: skip
REPLICA = {"replicas!": int, "restartPolicy": {"Never", "OnFailure"},
           "template!": {"spec!": {"containers!": list}}}  # fmt: skip
# Fields of the resource MPIJob, version v2beta1, that a job of ours may need.
MPI_JOB = {
    "apiVersion!": {"kubeflow.org/v2beta1"},
    "kind!": {"MPIJob"},
    "metadata!": {"name!": str, "namespace": str, "labels": dict},
    "spec!": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "sshAuthMountPath": str,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "runPolicy": {
            "cleanPodPolicy": {"None", "Running", "All"},
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
        },
        "mpiReplicaSpecs!": {"Launcher!": REPLICA, "Worker!": REPLICA},
    },
}


def test_the_job_for_kubernetes_has_the_fields_of_its_resource() -> None:
    job = yaml.safe_load((PROJECT / "batch/mpijob.yaml").read_text())
    field_of(MPI_JOB, job, "MPIJob")
    roles = job["spec"]["mpiReplicaSpecs"]
    for role, replica in roles.items():
        (container,) = replica["template"]["spec"]["containers"]
        field_of(CONTAINER, container, role)
        assert all(isinstance(word, str) for word in (*container["command"], *container["args"]))
        for variable in container.get("env", []):
            field_of({"name!": str, "value!": str}, variable, role)
    (launcher,) = roles["Launcher"]["template"]["spec"]["containers"]
    (worker,) = roles["Worker"]["template"]["spec"]["containers"]
    assert launcher["command"] == ["mpicomp", "run"]
    assert launcher["image"] == worker["image"]
    threads = next(one["value"] for one in launcher["env"] if one["name"] == "OMP_NUM_THREADS")
    assert int(worker["resources"]["limits"]["cpu"]) == int(threads) * job["spec"]["slotsPerWorker"]


def test_the_job_for_gpus_asks_the_doctor_first_and_then_runs_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = PROJECT / "slurm/gpu.sbatch"
    monkeypatch.setitem(TEMPLATES, "gpu", script)
    done = submit("gpu", tmp_path, "train.py", "--epochs", "3", job="[[ $5 == doctor ]] || exit 3")
    assert done.called == ["run", "--gpus", "-m", "mpicomp", "doctor", "run", "--gpus", "train.py", "--epochs", "3"]
    assert done.status == 3, done.output
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def test_a_job_for_gpus_whose_doctor_finds_a_fault_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TEMPLATES, "gpu", PROJECT / "slurm/gpu.sbatch")
    done = submit("gpu", tmp_path, "train.py", job="exit 1")
    assert done.called == ["run", "--gpus", "-m", "mpicomp", "doctor"]
    assert done.status == 1
