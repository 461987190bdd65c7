"""Memory of GPUs for MPI: the library's claim, the findings of a probe, and the calls that follow from them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, Ring
from collectives.arrays.gpu_mpi import claims, mode, verdict
from collectives.arrays.gpu_mpi.claims import Claim
from collectives.arrays.gpu_mpi.verdict import Outcome, Probe
from collectives.dense import device_sum
from collectives.dense.device_sum import DevicePayload
from collectives.launcher import without_launcher
from collectives.threads.run_local import run_local
from tests.fake_device import FakeArray, fake_devices

N = 500
VARIABLE = "MPICOMP_GPU_MPI"
CARRIES = verdict.carries


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process have asked nobody yet, ranks that are threads send by MPI, and all vectors be long."""
    fake_devices(monkeypatch)
    monkeypatch.setattr(device_sum, "STAGED_BYTES", 0)
    monkeypatch.setattr(device_sum, "DIRECT_BYTES", 0)
    monkeypatch.setattr(verdict, "verdict", verdict.Verdict())
    monkeypatch.setattr(verdict, "carries", lambda comm: True)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give a function that puts another program in the place of the probing process."""

    def be(program: str) -> None:
        path = tmp_path / "child.py"
        path.write_text(f"import os, signal, sys, time\n{program}\n")
        monkeypatch.setattr(verdict, "CHILD", path)

    return be


def says(monkeypatch: pytest.MonkeyPatch, aware: bool) -> None:
    monkeypatch.setattr(claims, "claims", lambda: [Claim("MPIX_Query_cuda_support()", aware)])


def summed(comm: Communicator) -> None:
    x = FakeArray(np.full(N, comm.rank + 1.0), index=comm.rank)
    np.testing.assert_array_equal(comm.allreduce(x).there, comm.size * (comm.size + 1) / 2)


# The user's setting ---------------------------------------------------------------------------------------------------


def test_auto_is_the_default_and_anything_unknown_is_refused() -> None:
    assert [mode({}), mode({VARIABLE: ""}), mode({VARIABLE: "on"}), mode({VARIABLE: "off"})] == [
        "auto", "auto", "on", "off",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="MPICOMP_GPU_MPI is 'yes': it must be auto, on or off"):
        mode({VARIABLE: "yes"})


def test_a_communicator_is_not_made_where_the_variable_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="rank 0 of 1: MPICOMP_GPU_MPI is 'yes'"):
        Communicator(MPI.COMM_SELF)


# The library's claim --------------------------------------------------------------------------------------------------


def claimed(
    monkeypatch: pytest.MonkeyPatch, library: Any, version: str = "Open MPI", kinds: str | None = None, **environ: str
) -> dict[str, bool]:
    info = SimpleNamespace(Get=lambda key: kinds, Free=lambda: None)
    world = SimpleNamespace(Get_info=lambda: info)
    mpi = SimpleNamespace(Get_library_version=lambda: version, COMM_WORLD=world, Exception=MPI.Exception)
    monkeypatch.setattr(claims, "MPI", mpi)
    monkeypatch.setattr(claims, "libraries", lambda: ["libmpi.so"])
    monkeypatch.setattr(ctypes, "CDLL", lambda file: library)
    return dict(claims.claims(environ))


def test_functions_of_open_mpi_and_mpich_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(kind: int, yes: Any) -> int:
        yes._obj.value = kind == 2
        return 0

    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: 1, MPIX_Query_rocm_support=lambda: 0)
    assert claimed(monkeypatch, library) == {"MPIX_Query_cuda_support()": True, "MPIX_Query_rocm_support()": False}
    assert claimed(monkeypatch, SimpleNamespace(MPIX_GPU_query_support=supports), "MPICH") == {
        "MPIX_GPU_query_support(cuda)": False,
        "MPIX_GPU_query_support(hip)": True,
    }


@pytest.mark.parametrize(
    ("version", "name"),
    [("CRAY MPICH version 8", "MPICH_GPU_SUPPORT_ENABLED"), ("MVAPICH2 2.3", "MV2_USE_CUDA"),
     ("Intel(R) MPI Library 2021", "I_MPI_OFFLOAD")],
)  # fmt: skip
def test_switches_count_of_the_library_that_reads_them(
    version: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [claimed(monkeypatch, SimpleNamespace(), version, None, **{name: value}) for value in ("1", "0")]
    assert found == [{f"{name}=1": True}, {f"{name}=0": False}]
    assert claimed(monkeypatch, SimpleNamespace(), "Open MPI", None, **{name: "1"}) == {}


def test_a_library_that_cannot_be_asked_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call would end by what is raised there."""

    def gone(*file: str) -> Any:
        raise OSError("cannot open shared object file") if file else NotImplementedError

    world = SimpleNamespace(Get_info=gone)
    mpi = SimpleNamespace(Get_library_version=lambda: "", COMM_WORLD=world, Exception=MPI.Exception)
    monkeypatch.setattr(claims, "MPI", mpi)
    monkeypatch.setattr(ctypes, "CDLL", gone)
    monkeypatch.setattr(claims, "libraries", lambda: ["/gone/libmpi.so (deleted)"])
    assert claims.claims({}) == []


def test_mpich_that_is_switched_off_says_no_and_kinds_of_memory_say_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: 1)
    off = claimed(monkeypatch, library, "MPICH", MPIR_CVAR_ENABLE_GPU="0")
    assert off == {"MPIR_CVAR_ENABLE_GPU=0": False}
    assert claimed(monkeypatch, SimpleNamespace(), kinds="mpi,system,cuda") == {
        "mpi_memory_alloc_kinds=mpi,system,cuda": True
    }


# Findings of a probe --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("print('wrong: 8 bytes')", "found wrong values: 8 bytes"),
        ("print('no start: no GPU')", "could not start: no GPU"),
        ("sys.exit('first\\nno route to host\\n')", "ended with status 1 and no result: no route to host"),
        ("sys.exit(3)", "ended with status 3 and no result: it said nothing"),
        ("print('works: so it says'); sys.exit(1)", "ended with status 1 and no result: it said nothing"),
        ("print('noise'); print('works: ' + sys.argv[1])", "works: cuda:3"),
    ],
)
def test_every_end_is_told(program: str, said: str, child: Any) -> None:
    child(program)
    assert Probe("cuda:3").wait() == Outcome(said.startswith("works"), said)


def test_a_probe_that_hangs_is_ended(child: Any) -> None:
    child("time.sleep(1000)")
    hanging = Probe("cuda:0", patience_s=0.2)
    assert hanging.wait() == Outcome(works=False, said="did not end in 0.2 s")
    assert hanging._process.returncode < 0


def test_a_probe_that_cannot_be_started_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    outcome = Probe("cuda:0").wait()
    assert not outcome.works
    assert "could not start" in outcome.said


def test_the_process_finds_the_transport_of_this_job_but_not_the_job() -> None:
    job = (
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_FD",
        "SLURM_PROCID",
        "OMPI_MCA_ess",
        "FLUX_JOB_ID",
        "HYDI_CONTROL_FD",
    )
    kept = ("OMPI_MCA_pml", "PATH", "CUDA_VISIBLE_DEVICES", "UCX_TLS", "MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA")
    assert set(without_launcher(dict.fromkeys(job + kept, "1"))) == set(kept)


def test_the_process_itself_sends_and_compares() -> None:
    """It tries the host's memory, which every MPI takes; and a GPU that nobody has is no crash."""
    pytest.importorskip("torch")
    assert Probe("cpu").wait() == Outcome(works=True, said="works: messages of up to 16777216 bytes from and to cpu")
    assert Probe("cuda:99").wait() == Outcome(works=False, said="could not start: PyTorch finds no GPU 99")


# Calls ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the devices that were tried."""
    tried: list[str] = []
    start = Probe.__init__

    def noted(self: Probe, device: str, *about: Any) -> None:
        tried.append(device)
        start(self, device, *about)

    monkeypatch.setattr(Probe, "__init__", noted)
    return tried


@pytest.mark.parametrize("works", [False, True])
def test_what_the_library_claims_is_tried_once_and_if_not_true_arrays_are_staged(
    works: bool, child: Any, probed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, aware=True)
    child("print('works: here')" if works else "os.kill(os.getpid(), signal.SIGSEGV)")
    direct = []
    make = DevicePayload.__init__

    def noted(self: Any, *about: Any, **options: Any) -> None:
        direct.append(about[-1])
        make(self, *about, **options)

    monkeypatch.setattr(DevicePayload, "__init__", noted)
    for _ in range(2):
        run_local(2, summed, Ring())
    assert len(probed) == 1
    assert direct == [works] * 4


@pytest.mark.parametrize(("chosen", "aware"), [("auto", False), ("off", True)])
def test_nothing_is_tried_where_nothing_speaks_for_it(
    chosen: str, aware: bool, probed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, aware)
    monkeypatch.setenv(VARIABLE, chosen)
    run_local(2, summed, Ring())
    assert not probed


def test_nothing_is_tried_where_all_arrays_are_in_the_hosts_memory(
    probed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, aware=True)
    run_local(2, lambda comm: comm.allreduce(np.ones(N)), Ring())
    assert not probed


def test_who_insists_is_told_by_all_ranks_what_the_probe_saw(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child("os.kill(os.getpid(), signal.SIGBUS)")
    monkeypatch.setenv(VARIABLE, "on")
    with pytest.raises(ValueError, match=r"rank \d of 2: MPICOMP_GPU_MPI=on, but .*crashed with SIGBUS. Set"):
        run_local(2, summed)


def test_who_insists_gets_it_though_the_library_says_no(
    child: Any, probed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, aware=False)
    child("print('works: here')")
    monkeypatch.setenv(VARIABLE, "on")
    run_local(2, summed, Ring())
    assert len(probed) == 1


def test_other_calls_go_on_while_the_probe_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, aware=True)
    over, ended = threading.Event(), list[bool]()

    class Slow:
        def __init__(self, device: str) -> None:
            self.outcome = Outcome(works=True, said="works")

        def Test(self) -> bool:  # noqa: N802 - MPI's name
            return over.is_set()

        def wait(self) -> Outcome:
            return self.outcome

    monkeypatch.setattr(verdict, "Probe", Slow)

    def take(comm: Communicator) -> None:
        x = np.full(N, 1.0)
        first = comm.iallreduce(FakeArray(x) if comm.rank == 0 else x)
        second = comm.iallreduce(x)
        np.testing.assert_array_equal(second.wait(), 2.0)
        ended.append(over.is_set())
        if len(ended) == 2:
            over.set()
        np.testing.assert_array_equal(getattr(first.wait(), "there", 2.0), 2.0)

    run_local(2, take, Ring())
    assert ended == [False, False]


def test_ranks_may_differ_in_what_they_may_hand_to_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(call: Any, device: str) -> Generator[bool, None, bool]:
        yield True
        return bool(call.group.here.startswith("rank 0"))

    monkeypatch.setattr(device_sum, "takes_device_memory", allowed)
    run_local(3, summed, Ring())


def test_ranks_that_are_threads_hand_no_memory_of_gpus_over() -> None:
    assert CARRIES(MPI.COMM_SELF)
    assert run_local(2, lambda comm: CARRIES(comm.mpi_comm)) == [False, False]
