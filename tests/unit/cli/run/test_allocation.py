"""Allocations of batch systems, as their jobs' environments state them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from mpicomp.cli.run import allocation
from mpicomp.cli.run.allocation import Host, expand, find_allocation, gpus, this_machine

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-2,07],m", ["n1", "n2", "n07", "m"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[1-2]-n[3,5]", ["rack1-n3", "rack1-n5", "rack2-n3", "rack2-n5"]),
    ],
)
def test_lists_of_hosts_are_expanded_as_slurm_does(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


def test_an_allocation_of_slurm() -> None:
    found = find_allocation(SLURM | {"SLURM_TASKS_PER_NODE": "2,1"})
    assert found is not None
    assert found.hosts == (Host("n1", 2, 8), Host("n2", 1, 8))
    assert found.slots == 3
    assert found.place(2) == [(Host("n1", 2, 8), 2)]
    assert found.place(3) == [(Host("n1", 2, 8), 2), (Host("n2", 1, 8), 1)]


def test_slurm_without_tasks_has_a_slot_for_each_core() -> None:
    found = find_allocation({name: value for name, value in SLURM.items() if name != "SLURM_TASKS_PER_NODE"})
    assert found is not None
    assert found.slots == 16


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one whose batch system does not bind it to cores, on a machine of 64."""
    monkeypatch.setattr(allocation, "cores", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.usefixtures("unbound")
def test_a_node_file_of_pbs_has_a_line_for_each_slot(tmp_path: Path) -> None:
    here, file = platform.node(), tmp_path / "nodes"
    file.write_text(f"{here}\n{here}\nother.site\nother.site\n")
    found = find_allocation({"PBS_NODEFILE": str(file), "NCPUS": "8"})
    assert found is not None
    assert found.hosts == (Host(here, 2, 8), Host("other.site", 2, 8))
    assert found.host_file == ""  # Open MPI reads it by itself


def test_a_host_that_lsf_names_twice_has_the_sum_of_its_slots() -> None:
    found = find_allocation({"LSB_MCPU_HOSTS": "a 2 b 1 a 1"})
    assert found is not None
    assert [(host.name, host.slots) for host in found.hosts] == [("a", 3), ("b", 1)]


def test_hosts_of_lsf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "cores", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # bound: the job has cores of its own
    here = platform.node()
    found = find_allocation({"LSB_MCPU_HOSTS": f"{here} 2 b 2 ", "LSB_DJOB_HOSTFILE": "/job/hosts"})
    assert found is not None
    assert found.hosts == (Host(here, 2, 4), Host("b", 2, 4))
    assert found.host_file == "/job/hosts"


@pytest.mark.parametrize("text", ["w0 slots=2\nw1 slots=2\n", "w0:2\nw1:2\n", "w0\nw0\n# a comment\n\nw1\nw1\n"])
@pytest.mark.parametrize("variable", allocation.HOST_FILES)
def test_host_files_of_launchers(tmp_path: Path, variable: str, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    found = find_allocation({variable: str(tmp_path / "hosts")})
    assert found is not None
    assert found.hosts == (Host("w0", 2), Host("w1", 2))  # this machine, a launcher's pod, is none of them
    assert found.host_file == str(tmp_path / "hosts")


def test_outside_of_allocations_the_cores_are_slots() -> None:
    assert find_allocation({}) is None
    assert this_machine().slots == allocation.cores() <= len(os.sched_getaffinity(0))


def test_threads_of_one_core_are_one_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(allocation, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(allocation, "quota", lambda: 3.5)
    assert allocation.cores() == 2
    monkeypatch.setattr(allocation, "quota", lambda: 1.5)
    assert allocation.cores() == 1


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            SLURM | {"SLURM_JOB_CPUS_PER_NODE": "8(x3)"},
            "SLURM_JOB_NODELIST names 2 nodes, SLURM_TASKS_PER_NODE 2 and SLURM_JOB_CPUS_PER_",
        ),
        (SLURM | {"SLURM_TASKS_PER_NODE": "many"}, "'many' should be a number"),
        ({"PBS_NODEFILE": "/no/such"}, "PBS_NODEFILE=/no/such: No such file"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        find_allocation(environ)


# GPUs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-4a1, MIG-7b"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, 2),
        (SLURM | {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0"}, 1),
        (SLURM | {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2),
        (SLURM | {"SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        (SLURM | {"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, 3),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0"}, 1),  # of a job that has ended
    ],
)
def test_gpus_of_a_node_are_those_that_slurm_or_the_user_names(environ: dict[str, str], number: int) -> None:
    assert gpus(environ) == number


def test_gpus_are_counted_by_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "DEVICES", tmp_path)
    assert gpus({}) == 0
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri/renderD128").touch()  # a screen's
    assert gpus({}) == 0
    (tmp_path / "kfd").touch()
    assert gpus({}) == 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus({}) == 2
