"""`mpicomp bench --device cuda`, on a fake device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels for GPUs need Triton, or its interpreter")

from collectives import Communicator, arrays
from collectives.threads.run_local import run_local
from mpicomp import Dense, Marsit
from mpicomp.cli.bench import vectors as bench_vectors
from mpicomp.cli.bench.measure import baseline
from mpicomp.cli.bench.vectors import DeviceVectors
from mpicomp.cli.command import UsageError
from mpicomp.cli.main import main
from tests.fake_device import FakeArray, FakeDevice, fake_devices

QUICK = ("bench", "--device", "cuda", "--repeats", "1", "--warmup", "0")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeDevice]:
    """Give the devices, two on this node, which are made when they are asked for."""
    monkeypatch.setattr(bench_vectors, "gpu_count", lambda: 2)
    monkeypatch.setattr(bench_vectors, "gpu_name", lambda number: "Fake F1")

    def tensor(device: FakeDevice, n: int, dtype: str) -> FakeArray:
        return FakeArray(np.zeros(n, dtype), index=int(device.name.partition(":")[2]))

    monkeypatch.setattr("mpicomp.cli.bench.vectors.tensor", tensor)
    return fake_devices(monkeypatch)


def bench(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main([*QUICK, *arguments, "--json", str(path / "bench.json")])
    return status, json.loads((path / "bench.json").read_text().splitlines()[-1])


@pytest.mark.parametrize("baseline", ["mpi", "dense"], ids="{} as baseline".format)
def test_methods_encode_where_the_vectors_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: dict[int, FakeDevice], baseline: str
) -> None:
    option = "--option", "full_precision_every=None"
    status, line = bench(tmp_path, "--count", "640,1280", *option, "--baseline", baseline)
    assert (status, line["check"], line["count"]) == (0, "ok", 1280)
    about = {"device": "cuda", "encoded_on": "cuda", "gpus": 1, "gpu_names": ["Fake F1"]}
    assert {key: line[key] for key in about} == about
    through_host = "; baseline: through the host's memory" if baseline == "mpi" else ""
    assert f"vectors on 1 GPU (Fake F1), encoded there{through_host}\n" in capsys.readouterr().out
    # a vector is brought, and results and residuals of the calls that are checked; of MPI's baseline all crosses twice
    assert made[0].copied.count(4 * 1280) == 1 + 2 * 3 + (2 if baseline == "mpi" else 0)
    # to the host behind a sum and the number of clipped elements, to the device with the scales of the next step
    assert made[0].copied.count(1280 // 8 + 16) == 4 + 4


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (("--algorithm", "dense"), "ok"),
        (("--algorithm", "allreduce", "--dtype", "float16"), "ok"),
        (("--algorithm", "ssdm"), "ok"),
        (("--algorithm", "scalecom", "--option", "rate=10", "--no-check"), None),
    ],
)
def test_the_report_says_where_vectors_are_encoded(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    made: dict[int, FakeDevice],
    arguments: tuple[str, ...],
    result: str | None,
) -> None:
    status, line = bench(tmp_path, "--count", "500", *arguments)
    assert (status, line["check"]) == (0, result)
    there = line["encoded_on"] == "cuda"
    assert there == (arguments[1] == "scalecom")
    assert (", not encoded there" in capsys.readouterr().out) != there


def test_a_wrong_result_on_the_device_is_seen(
    tmp_path: Path, made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Communicator.allreduce

    def doubled(self: Communicator, x: Any, op: Any, out: Any) -> Any:
        result = honest(self, x, op, out)
        result.there *= 2
        return result

    monkeypatch.setattr(Communicator, "allreduce", doubled)
    status, line = bench(tmp_path, "--count", "100", "--algorithm", "allreduce")
    assert status == 1
    assert "the exact result is" in line["check"]


def test_a_staged_call_ends_when_its_result_is_on_the_device(made: dict[int, FakeDevice], comm: Communicator) -> None:
    vectors = DeviceVectors(arrays.named("cuda:0"), 100, "float32")
    vectors.fill(0, 0)
    other = baseline("mpi", comm, vectors)
    assert other is not None
    vectors.x[:] = 0  # it is fetched again
    other.call(vectors.given, vectors.target)
    np.testing.assert_array_equal(vectors.target.there, vectors.given.there)
    assert made[0].copied == [400, 400, 400]


def test_ranks_of_a_node_take_its_gpus_in_turn(made: dict[int, FakeDevice]) -> None:
    found = run_local(3, lambda comm: bench_vectors.find_gpu(comm, Marsit(), "float32"))
    assert [gpu.device.name for gpu in found] == ["fake:0", "fake:1", "fake:0"]
    assert [gpu.start for gpu in found] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [gpu.fields["gpus"] for gpu in found] == [2, 2, 2]
    assert run_local(
        1, lambda comm: [bench_vectors.find_gpu(comm, one, "float32").start for one in (Dense(), None)]
    ) == [["cpu", "cpu"]]


def test_a_rank_without_a_gpu_is_reported_on_all_ranks(
    made: dict[int, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpu_name(number: int) -> str:
        if number == 1:
            raise RuntimeError("CUDA error: out of memory")
        return "Fake F1"

    monkeypatch.setattr(bench_vectors, "gpu_name", gpu_name)

    def find(comm: Communicator) -> None:
        with pytest.raises(
            UsageError, match=r"rank 1 of 2, on .*: --device cuda: CUDA error: .*; or take --device cpu"
        ):
            bench_vectors.find_gpu(comm, Marsit(), "float32")

    run_local(2, find)


def test_without_a_gpu_one_line_names_the_cure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*QUICK, "--count", "100"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in ("mpicomp bench: error: rank 0 of 1, on ", "PyTorch finds no GPU there", "or take --device cpu"):
        assert part in error


def test_missing_kernels_are_reported_where_a_method_would_use_them(
    made: dict[int, FakeDevice], comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(kind: str) -> Any:
        raise ImportError("kernels need Triton")

    monkeypatch.setattr("mpicomp.cli.bench.vectors.kernels.of", of)
    with pytest.raises(UsageError, match="kernels need Triton; install it, or take --device cpu"):
        bench_vectors.find_gpu(comm, Marsit(), "float32")
    assert not bench_vectors.find_gpu(comm, Dense(), "float32").encodes


def test_no_room_on_the_device_is_reported_in_one_line(
    made: dict[int, FakeDevice], capsys: pytest.CaptureFixture[str]
) -> None:
    arrays.named("cuda:0").has_memory = False
    assert main([*QUICK, "--count", "100"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--count 100: out of memory; take fewer elements" in error


def test_no_room_for_the_state_of_a_method_is_reported_in_one_line(
    made: dict[int, FakeDevice], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_method(*about: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("mpicomp.cli.bench.start_method", start_method)
    assert main([*QUICK, "--count", "100"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "rank 0 of 1: --count 100: CUDA out of memory; take fewer elements" in error
