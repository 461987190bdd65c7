"""The benchmark of the GPU's kernels: its end without a GPU, and its tables of times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.performance import gpu_kernels

PROJECT = Path(__file__).resolve().parents[4]
RUN_ALL_CALLS = """
from apps.performance.gpu_calls import calls
for name, (call, nbytes) in calls(3000, "cpu").items():
    call()
    print(name, nbytes)
"""


@pytest.mark.parametrize("options", [[], ["--quick"], ["--numba-cuda"]], ids=str)
def test_without_a_gpu_one_message_says_so_and_there_is_no_record(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "record.json"
    assert gpu_kernels.main([*options, "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(": the GPU's kernels are not measured\n")
    assert printed.err.count("\n") == 1
    assert not path.exists()


def test_shares_are_those_of_the_bandwidth_that_a_copy_reaches() -> None:
    timed = {"copy": {"min_s": 1.0, "median_s": 2.0}, "pack": {"min_s": 1.0, "median_s": 1.5}}
    copy, pack = gpu_kernels.rows(timed, {"copy": 800, "pack": 600})
    assert (copy["share"], copy["bytes_per_s"]) == (1.0, 800.0)
    assert (pack["share"], pack["bytes"], pack["median_s"]) == (0.75, 600, 1.5)


def test_with_a_gpu_the_table_is_printed_and_the_record_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(calls: dict[str, Any], repeats: int) -> dict[str, Any]:
        return {name: np.full(repeats, 1e-4) for name in calls}

    monkeypatch.setattr(gpu_kernels, "name_missing", lambda numba_cuda: "")
    monkeypatch.setattr(gpu_kernels, "calls", lambda n, device: {"copy": (print, 8 * n), "pack": (print, 4 * n)})
    monkeypatch.setattr(gpu_kernels, "time_on_device", timed)
    monkeypatch.setattr(gpu_kernels, "version", lambda package: "1")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    path = tmp_path / "record.json"
    assert gpu_kernels.main(["--quick", "--json", str(path)]) == 0
    assert "| pack | 100 | 100 | 4.0 | 40 | 0.50 |" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["settings"]["device"] == "a GPU"
    assert [row["kernel"] for row in record["rows"]] == ["copy", "pack"]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_every_call_is_one_that_the_kernels_take() -> None:
    run = subprocess.run(
        [sys.executable, "-c", RUN_ALL_CALLS], cwd=PROJECT, env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "top 1 of 100 " in run.stdout
