"""Findings of `mpicomp doctor` about GPUs, MPI with their memory, and the way of arrays."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.arrays.gpu_mpi import claims, verdict
from collectives.arrays.gpu_mpi.claims import Claim
from collectives.arrays.gpu_mpi.verdict import Outcome
from mpicomp.cli.doctor import gpu
from mpicomp.cli.doctor.finding import Finding
from mpicomp.cli.doctor.gpu import Seen
from tests.fake_device import FakeDevice

WORKS, CRASHED = Outcome(works=True, said="works: all of it"), Outcome(works=False, said="crashed with SIGSEGV")


@pytest.fixture(autouse=True)
def found_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPICOMP_GPU_MPI", raising=False)
    monkeypatch.setattr(verdict, "verdict", verdict.Verdict())
    monkeypatch.setattr(claims, "claims", lambda: [Claim("MPIX_Query_cuda_support()", aware=True)])


def report(
    monkeypatch: pytest.MonkeyPatch, names: list[str], outcome: Outcome | None, **environ: str
) -> dict[str, Finding]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu, "DRIVERS", [Path("/")])
    monkeypatch.setattr(gpu, "_names", lambda: names)
    monkeypatch.setattr(gpu, "_open_gpu", FakeDevice)
    monkeypatch.setattr(gpu, "version", lambda package: "9.9")
    verdict.verdict.outcome = outcome
    return {finding.name: finding for finding in gpu.findings()}


def test_without_a_driver_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes seconds to import, and is not."""
    monkeypatch.setattr(gpu, "DRIVERS", [Path("/nowhere")])
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(gpu, "_names", lambda: pytest.fail("PyTorch was asked"))
    found = {finding.name: finding for finding in gpu.findings()}
    assert found["GPUs"].text == "none: there is no driver"
    assert "not tried without a GPU" in found["arrays on GPUs"].text
    assert "copies of GPUs" not in found
    assert {finding.status for finding in found.values()} == {"ok"}
    assert verdict.verdict.outcome is None


@pytest.mark.parametrize(("outcome", "way"), [(WORKS, "direct"), (CRASHED, "staged")])
def test_the_way_of_arrays_follows_the_probe_and_the_copies_are_measured(
    outcome: Outcome, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(monkeypatch, ["Fake F1", "Fake F1"], outcome)
    assert found["GPUs"].text == "cuda:0 Fake F1, cuda:1 Fake F1; Triton 9.9"
    assert found["MPI and GPUs"].text.endswith("takes memory of GPUs: MPIX_Query_cuda_support() yes")
    assert way in found["arrays on GPUs"].text
    assert f"the probe {outcome.said}" in found["arrays on GPUs"].text
    assert "fake:0 to the host" in found["copies of GPUs"].text
    assert {finding.status for finding in found.values()} == {"ok"}


def test_a_gpu_that_pytorch_does_not_find_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(monkeypatch, [], None)
    assert found["GPUs"].status == "warn"
    assert "install PyTorch's build" in found["GPUs"].cure


def test_missing_triton_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(gpu, "version", missing)
    assert gpu.present(driver=True, names=["Fake F1"]).status == "warn"


def test_a_transport_that_is_forced_and_does_not_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(monkeypatch, ["Fake F1"], CRASHED, MPICOMP_GPU_MPI="on")
    assert found["arrays on GPUs"].status == "FAIL"
    assert "SIGSEGV" in found["arrays on GPUs"].text
    assert report(monkeypatch, [], None, MPICOMP_GPU_MPI="yes")["arrays on GPUs"].status == "FAIL"


def test_a_library_that_says_nothing_and_one_that_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "claims", list)
    assert "makes no claim" in gpu.report_claims().text
    monkeypatch.setattr(claims, "claims", lambda: [Claim("MPIX_Query_cuda_support()", aware=False)])
    assert gpu.report_claims().text.endswith("does not take memory of GPUs: MPIX_Query_cuda_support() no")


A, B, C, D = (Seen(2, f"GPU-{letter}", has_nccl=True) for letter in "abcd")


@pytest.mark.parametrize(
    ("seen", "status", "text"),
    [
        ([A, B, C, D], "ok", "a GPU for each of 4 ranks on 2 hosts, and NCCL"),
        ([Seen(1, "GPU-a", has_nccl=True), Seen(1, "GPU-b", has_nccl=True), C, D], "ok", "a GPU for each of 4 ranks"),
        ([A, B, Seen(), Seen()], "warn", "no GPU is found on n2 by ranks 2, 3, and other hosts have some"),
        ([A, A, C, D], "warn", "2 ranks on n1 share 1 GPU, and NCCL takes one for each rank"),
        ([A, B, C, Seen(2)], "warn", "2 ranks on n2 share 1 GPU"),
        ([A, B, C._replace(n_gpus=4), D._replace(n_gpus=4)], "warn", "2 of the 4 GPUs on n2 have a rank"),
        ([A, B, C, D._replace(has_nccl=False)], "warn", "PyTorch of rank 3 has no NCCL"),
    ],
)
def test_gpus_of_all_ranks_are_one_finding_with_the_cure(seen: list[Seen], status: str, text: str) -> None:
    (finding,) = gpu.of_ranks(["n1", "n1", "n2", "n2"], seen)
    assert (finding.name, finding.status) == ("ranks and GPUs", status)
    assert finding.text.startswith(text)
    assert bool(finding.cure) == (status == "warn")


def test_without_gpus_or_other_ranks_there_is_nothing_to_compare() -> None:
    assert gpu.of_ranks(["n1", "n2"], [Seen(), Seen()]) == []
    assert gpu.of_ranks(["n1"], [Seen(4, "GPU-a")]) == []


def test_a_rank_without_a_driver_sees_nothing_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRIVERS", [Path("/nowhere")])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu.seen(1) == Seen()


@pytest.mark.parametrize(("names", "index"), [(["F1"] * 4, 2), (["F1"], 0), (["F1"] * 2, None)])
def test_a_rank_sees_the_gpu_with_its_number_or_the_only_one(
    names: list[str], index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(number: int) -> object:
        if number >= len(names):
            raise AssertionError("Invalid device id")
        return SimpleNamespace(uuid=f"GPU-{number}")

    monkeypatch.setattr(gpu, "DRIVERS", [Path("/")])
    monkeypatch.setattr(gpu, "_names", lambda: names)
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert gpu.seen(2) == Seen(len(names), "" if index is None else f"GPU-{index}", has_nccl=True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: object())  # of older PyTorch
    assert gpu.seen(0).identity == f"{platform.node()}:0"
