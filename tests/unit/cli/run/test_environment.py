"""Settings of jobs: the same in ``slurm/env.sh`` and ``mpicomp run``, and chosen again where a job starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from mpicomp.cli import main as cli
from mpicomp.cli.run import start
from mpicomp.cli.run.environment import MARK, THREADS, choose, for_shell, threads
from tests.documents import PROJECT
from tests.unit.cli.run.test_allocation import SLURM

BINDING = "PRTE_MCA_hwloc_default_binding_policy"
OURS = ("OMP_", "OMPI_", "PRTE_", "MPICOMP_", "SLURM_", "PBS_", "LSB_", "THP_")
# Of bash, or of the folder that a shell is in.
SHELLS = ("_", "SHLVL", "PWD", "OLDPWD", "PYTHONPATH")


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


def sourced(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of a shell that has sourced ``slurm/env.sh``."""
    script = f". {shlex.quote(str(PROJECT))}/slurm/env.sh && env -0"
    text = subprocess.run(
        ["bash", "-c", script], env=environ | {"MPICOMP_VENV": sys.prefix}, check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split("=", 1) for line in text.split("\0") if line)


@pytest.mark.parametrize("slots", ["1(x2)", "2(x2)"], ids="{} a node".format)
@pytest.mark.parametrize("prepared", [False, True], ids=["", "prepared"])
@pytest.mark.parametrize("allocated", [False, True], ids=["here", "slurm"])
def test_the_command_gives_the_environment_that_the_script_gives(
    allocated: bool, prepared: bool, slots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`prepared`: from a shell with the settings of one machine, which sbatch passes on."""
    base = sourced(clean()) if prepared else clean()
    base |= SLURM | {"SLURM_TASKS_PER_NODE": slots} if allocated else {}
    expected = sourced(base)
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in base.items():
        monkeypatch.setenv(name, value)
    found: list[dict[str, str]] = []

    def replace(line: list[str], environ: dict[str, str]) -> int:
        found.append(environ)
        return 0

    monkeypatch.setattr(start, "run_job", replace)
    # without an allocation the script knows no number of ranks, and means many
    assert cli.main(["run", "--launcher", "true", *([] if allocated else ["-n", "64"]), "env"]) == 0
    expected["MPICOMP_VENV"] = found[0]["MPICOMP_VENV"] = sys.prefix
    path = expected.pop("PATH").split(os.pathsep)
    assert found[0].pop("PATH").split(os.pathsep)[0] == path[0]
    assert {k: v for k, v in found[0].items() if k not in SHELLS} == {
        k: v for k, v in expected.items() if k not in SHELLS
    }
    assert expected[THREADS] == {"1(x2)": "8", "2(x2)": "4"}[slots] if allocated else "1"


def test_variables_of_the_user_win() -> None:
    settings = choose({THREADS: "3", "OMPI_MCA_btl": "tcp,self", "THP_MEM_ALLOC_ENABLE": "0"}, 1, one_machine=True)
    assert not {THREADS, "OMPI_MCA_btl", "THP_MEM_ALLOC_ENABLE"} & set(settings.added)
    assert THREADS not in settings.added[MARK]
    for value in ("abc", "0", "-1", "2,x"):  # OpenMP ignores these
        assert choose({THREADS: value}, 2, one_machine=True).added[THREADS] == "2"
    assert THREADS not in choose({THREADS: "4, 2"}, 2, one_machine=True).added


def test_a_setting_that_the_user_changes_in_a_shell_with_ours_wins() -> None:
    shell = choose({}, 1, one_machine=True).apply({}) | {THREADS: "4"}
    assert choose(shell, 1, one_machine=True).apply(shell)[THREADS] == "4"
    assert choose(shell, 1, one_machine=False).apply(shell)[THREADS] == "4"
    assert choose(shell | {THREADS: "1"}, 8, one_machine=True).apply(shell)[THREADS] == "8"


def test_settings_of_one_machine_end_where_an_allocation_begins() -> None:
    here = choose({}, 1, one_machine=True)
    there = choose(here.apply({}), 1, one_machine=False)
    assert set(there.removed) == {pair.split("=")[0] for pair in here.added[MARK].split()} - {THREADS}
    assert there.apply(here.apply({})) == choose({}, 1, one_machine=False).apply({})


def test_a_users_setting_of_the_same_name_stays() -> None:
    here = choose({"OMPI_MCA_btl": "tcp,self"}, 1, one_machine=True).apply({"OMPI_MCA_btl": "tcp,self"})
    assert choose(here, 1, one_machine=False).apply(here)["OMPI_MCA_btl"] == "tcp,self"


def test_choosing_twice_changes_nothing() -> None:
    once = for_shell({}).apply({})
    assert for_shell(once).apply(once) == once


@pytest.mark.parametrize(("user", "n_threads", "unbound"), [({}, 1, False), ({}, 4, True), ({THREADS: "2"}, 1, True)])
def test_ranks_of_several_threads_are_not_bound_to_one_core(
    user: dict[str, str], n_threads: int, unbound: bool
) -> None:
    assert (BINDING in choose(user, n_threads, one_machine=False).added) == unbound


@pytest.mark.parametrize(
    ("environ", "placed", "expected"),
    [
        ({}, [(8, 2)], 4),
        ({}, [(8, 3)], 2),
        ({}, [(2, 4)], 1),
        ({}, [(8, 2), (8, 4)], 2),
        ({}, [(None, 2)], 1),
        ({}, [], 1),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3"}, [(8, 2)], 3),
        ({"SLURM_CPUS_PER_TASK": "3"}, [(8, 2)], 4),
    ],
)
def test_ranks_share_the_cores_of_their_host(
    environ: dict[str, str], placed: list[tuple[int | None, int]], expected: int
) -> None:
    assert threads(environ, placed) == expected
