"""The programs that measure all-reduces and training on GPUs: without a GPU, and on a fake device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from apps.launch import PROJECT, mpi_environment, python_command, run
from apps.performance import gpu_allreduce, gpu_nccl, gpu_training, run_all
from apps.performance.gpu_machine import Place, choose_gpu, driver_version
from apps.performance.gpu_profile import Activity, activities, busy, hidden_share
from collectives import Communicator, Ring, arrays
from collectives.arrays import gpu_mpi
from collectives.threads.run_local import run_local
from tests.fake_device import FakeArray, FakeDevice

BOTH = pytest.mark.parametrize("program", [gpu_allreduce, gpu_training])
MOST_CALLS = 300  # in Python of a bucket of 9 tensors: 570 before they were counted; polls make up to 5 more or less
SOFTWARE = {"device": "a GPU", "driver": "1.2", "torch": "3", "triton": "4"}
STAGED = [
    Activity("_encode_kernel", 20, 0, 2),
    Activity("Memcpy DtoH (Device -> Pinned)", 21, 1, 3),
    Activity("Memcpy HtoD (Pinned -> Device)", 21, 4, 6),
]


@BOTH
@pytest.mark.parametrize("options", [[], ["--quick"]], ids=str)
def test_without_a_gpu_one_message_says_so_and_there_is_no_record(
    program: Any, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv(gpu_mpi.VARIABLE, "off")
    monkeypatch.setattr("mpicomp.install_abort_hook", lambda: None)
    assert program.main([*options, "--json", str(tmp_path / "record.json")]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rank 0 of 1: PyTorch finds no GPU: ")
    assert printed.err.endswith(" on GPUs are not measured\n")
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_rank_without_a_gpu_is_named_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def place(comm: Communicator) -> Place | None:
        lacks[comm.rank] = "PyTorch finds no GPU" if comm.rank == 1 else ""
        return choose_gpu(comm, "such things are")

    lacks: dict[int, str] = {}
    told = iter(["", "PyTorch finds no GPU"])
    monkeypatch.setattr("apps.performance.gpu_machine.name_missing", lambda numba_cuda: next(told))
    assert run_local(2, place, Ring()) == [None, None]
    err = capsys.readouterr().err
    assert err.endswith(" of 2: PyTorch finds no GPU: such things are not measured\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("gpus", "alone"), [(1, False), (2, True), (4, True)])
def test_ranks_take_gpus_in_turn(gpus: int, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("apps.performance.gpu_machine.name_missing", lambda numba_cuda: "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("apps.performance.gpu_machine.identity", "GPU {}".format)

    def place(comm: Communicator) -> Place | None:
        return choose_gpu(comm, "")

    found = run_local(2, place, Ring())
    assert found == [Place(f"cuda:{rank % gpus}", alone) for rank in range(2)]
    assert sorted(chosen) == sorted(rank % gpus for rank in range(2))


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        (gpu_allreduce, ["--mb", "0"], "argument --mb: '0' is no positive number"),
        (gpu_allreduce, ["--mb", "inf"], "argument --mb: 'inf' is no positive number"),
        (gpu_training, ["--layers", "x"], "argument --layers: 'x' is no positive number"),
        (gpu_training, ["--no"], "unrecognized arguments: --no"),
        (gpu_training, ["--quick", "--width", "30"], "a width of 30 cannot be shared by 4 heads: choose a multiple"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_in_one_line(
    program: Any, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("mpicomp.install_abort_hook", lambda: None)
    with pytest.raises(SystemExit) as error:
        program.main(options)
    assert said in capsys.readouterr().err + str(error.value)


def test_copies_are_hidden_to_the_share_of_their_time_in_which_kernels_run() -> None:
    kernel, *copies = STAGED
    assert busy(copies) == 4
    assert busy(STAGED) == 5
    assert hidden_share(copies, [kernel]) == 0.25
    assert hidden_share(copies[:1], [kernel, kernel]) == 0.5
    assert hidden_share([], [kernel]) is None


def test_only_what_the_device_does_counts_of_a_profile() -> None:
    from torch._C._autograd import DeviceType

    def event(name: str, kind: Any, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=1e6, end=2e6)
        return SimpleNamespace(
            name=name, device_resource_id=7, time_range=span, device_type=kind, is_user_annotation=annotation
        )

    events = [event("k", DeviceType.CUDA), event("aten::add", DeviceType.CPU), event("step", DeviceType.CUDA, True)]
    assert activities(events) == [Activity("k", 7, 1, 2)]


def test_the_driver_is_what_the_first_file_that_is_there_says(tmp_path: Path) -> None:
    said = tmp_path / "version"
    said.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC 12.3\n")
    assert driver_version((tmp_path / "none", said)) == "550.54.15"
    assert driver_version((tmp_path / "none",)) == "unknown"


def test_nccl_is_not_timed_where_ranks_share_a_gpu_or_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_nccl.why_not(Place("cuda:0", alone=False)) == "ranks share a GPU, and it takes one each"
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert gpu_nccl.why_not(Place("cuda:0", alone=True)) == "PyTorch is built without it"


def stand_in(program: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program find a GPU of one rank."""
    monkeypatch.setattr("mpicomp.install_abort_hook", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(program, "choose_gpu", lambda comm, what: Place(device, alone=False))
    monkeypatch.setattr(program, "software", lambda: SOFTWARE)


def read(path: Path) -> Any:
    record = json.loads(path.read_text())
    assert SOFTWARE.items() <= record["settings"].items()
    assert record["environment"]["mpi"]
    return record


@pytest.mark.gpu
def test_all_reduces_on_a_device_fill_tables_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("triton")

    def recorded(call: Callable[[], object]) -> list[Activity]:
        call()
        return STAGED

    device, peaks = FakeDevice(), iter([1000, 1000 + 4 * 5000 + 60_000])
    stand_in(gpu_allreduce, "cuda:0", monkeypatch)
    monkeypatch.setenv(gpu_mpi.VARIABLE, "off")
    monkeypatch.setitem(arrays.MAKERS, arrays.CUDA, lambda index: device)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: next(peaks))
    monkeypatch.setattr(gpu_allreduce, "record", recorded)
    values = np.random.default_rng(0).standard_normal(5000, np.float32)
    monkeypatch.setattr(gpu_allreduce, "gradients", lambda *_: (FakeArray(values), FakeArray(np.empty_like(values))))
    path = tmp_path / "record.json"
    assert gpu_allreduce.main(["--quick", "--mb", "0.02", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    record = read(path)
    assert [row["call"] for row in record["rows"]] == ["Marsit on the GPU", "dense, staged"]
    assert [row["target"] for row in record["rows"]] == ["≥ 10", ""]
    assert device.copied
    assert record["memory"] == {"beyond": 60_000, "piece": 20_000}
    assert "beyond vector, residual and result: 0.1 MB, which is 3.00 pieces of 0.0 MB (target: ≤ 2)" in printed
    assert "NCCL is not timed: ranks share a GPU" in printed
    for line in (
        "| to the host | 667 | 50% |  |",
        "| to the device | 667 | 0% |  |",
        "| both ways | 1333 | 25% | ≥ 80% |",
    ):
        assert line in printed


def test_speed_is_held_against_the_dense_call() -> None:
    timed = {"dense": {"median_s": 3.0, "min_s": 2.0}, gpu_allreduce.ONE_BIT: {"median_s": 0.25, "min_s": 0.25}}
    dense, one_bit = gpu_allreduce.compare(timed, "dense")
    assert (dense["speedup"], one_bit["speedup"], one_bit["speedup_of_minima"]) == (1.0, 12.0, 8.0)


class Event:
    """An event of a device whose clock goes on by a millisecond with each."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        type(self).count += 1
        self.at = self.count

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_training_on_a_device_fills_tables_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    computing = [Activity("gemm<a|b>", 7, 0, 3)]
    profiles = iter([computing, computing, [*computing, *STAGED], computing])

    def recorded(call: Callable[[], object], trace: Path | None) -> list[Activity]:
        call()
        traces.append(trace)
        return next(profiles)

    traces: list[Path | None] = []
    stand_in(gpu_training, "cpu", monkeypatch)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr(gpu_training, "record", recorded)
    path = tmp_path / "record.json"
    options = ["--quick", "--layers", "1", "--width", "8", "--context", "4", "--repeats", "2", "--trace", "t.json"]
    assert gpu_training.main([*options, "--json", str(path)]) == 0
    printed, record = capsys.readouterr().out, read(path)
    assert traces == [None, None, Path("t.json"), None]
    alone, under_ddp, beside, relay = record["rows"]
    assert [one["side"] for one in record["rows"]] == ["alone", "under DDP", "with Marsit", "with Relay"]
    assert (under_ddp["target"], relay["target"]) == ("", "≤ 3%")
    assert {row["side"] for row in record["host"]} == {"with Marsit", "with Relay"}
    assert all(row["calls"] > 0 and row["seconds"] >= 0 for row in record["host"])
    assert "Functions of the host in `optimizer.step()`, by step:" in printed
    assert alone["parts"] == {"computing": 1.5, "encoding": 0, "copies": 0}
    assert beside["parts"] == {"computing": 1.5, "encoding": 1.0, "copies": 2.0}
    assert (alone["computing"]["median_s"], beside["slowdown"], beside["target"]) == (1e-3, 0.0, "≤ 3%")
    assert (record["settings"]["layers"], record["settings"]["heads"]) == (1, 4)
    assert "| `gemm<a\\|b>` | computing | 0.5 | 1500 | 33.3% |" in printed


def test_run_all_says_what_a_part_without_a_gpu_says_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started: list[str] = []

    def run(command: list[str], *_: object, **__: object) -> tuple[int, str]:
        started.append(command[command.index("-m") + 1])
        return 0, "no GPU: not measured\n"

    monkeypatch.setattr(run_all, "run", run)
    monkeypatch.setattr("os.nice", lambda _: 0)
    assert run_all.main(["--only", ",".join(run_all.GPU_PARTS), "--json-dir", str(tmp_path)]) == 0
    err = capsys.readouterr().err.splitlines()
    names = ["kernels", "allreduce", "allreduce", "training", "training"]
    assert started == [f"apps.performance.gpu_{name}" for name in names]
    assert err.count("no GPU: not measured") == len(names)


def test_tables_of_gpus_are_printed_and_not_put_into_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(run_all, "run", lambda *_, **__: (0, ""))
    monkeypatch.setattr("os.nice", lambda _: 0)
    document = tmp_path / "document.md"
    document.write_text("no place for tables")
    (tmp_path / "gpu-kernels.json").write_text(json.dumps({"rows": [], "settings": {}, "environment": {}}))
    monkeypatch.setattr("apps.performance.part.describe", lambda _: "a machine")
    arguments = ["--only", "gpu-kernels", "--json-dir", str(tmp_path), "--docs", str(document)]
    assert run_all.main(arguments) == 0
    assert "## gpu-kernels\n" in capsys.readouterr().out
    assert document.read_text() == "no place for tables"


def test_the_host_s_work_of_a_bucket_is_within_the_budget(tmp_path: Path) -> None:
    """Run Triton's and PyTorch's real code in a process of its own, as this one has kernels interpreted."""
    pytest.importorskip("triton")
    path = tmp_path / "record.json"
    env = {name: value for name, value in mpi_environment().items() if name != "TRITON_INTERPRET"}
    arguments = ["-m", "apps.performance.host_time", "--quick", "--json", str(path)]
    status, output = run(python_command(1, arguments), env, cwd=PROJECT, timeout_s=300)
    assert status == 0, output
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    # one launch encodes and one decodes; one copy and one event each way, and one event behind the gradients
    marsit = {name: rows["Marsit"][name] for name in ("launches", "copies", "events")}
    assert marsit == {"launches": 2, "copies": 2, "events": 3}
    assert rows["Marsit"]["calls"] <= MOST_CALLS
    for levels in (4, 16):
        relay = rows[f"Relay({levels})"]
        assert relay["copies"] == 1
        assert relay["events"] <= 2
        assert relay["launches"] <= 2
        assert relay["calls"] <= MOST_CALLS + 20
    assert rows["alone"]["launches"] == rows["alone"]["copies"] == 0
    assert "\n| Marsit |" in output
