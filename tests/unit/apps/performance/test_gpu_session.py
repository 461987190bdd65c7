"""The session on a machine with GPUs: its order and limits, and a run of all of it on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apps.launch import PROJECT
from apps.performance import gpu_dry, gpu_session
from apps.performance.gpu_session import NAMES, PARTS, TESTS
from apps.records import read_record


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Any, float | None]]:
    """Note commands, environments and limits instead of running them; the second command fails."""
    found: list[tuple[list[str], Any, float | None]] = []

    def run(command: list[str], environment: Any, *, cwd: Path, timeout_s: float | None) -> tuple[int, str]:
        found.append((command, environment, timeout_s))
        return int(len(found) == 2), f"table {len(found)}"

    monkeypatch.setattr(gpu_session, "run", run)
    return found


def test_a_session_takes_six_minutes_at_most() -> None:
    assert sum(part.limit_s for part in PARTS) <= 360
    assert all((PROJECT / path).exists() for path in TESTS)


def test_parts_run_in_their_order_and_a_failure_ends_no_other(
    started: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu_session.main(["--folder", str(tmp_path)]) == 1
    modules = [command[command.index("-m") + 1] for command, _, _ in started]
    names = ["kernels", "kernels", "training", "training", "allreduce"]
    assert modules == ["pytest", *(f"apps.performance.gpu_{name}" for name in names)]
    assert [limit for _, _, limit in started] == [part.limit_s for part in PARTS]
    assert not any("TRITON_INTERPRET" in environment for _, environment, _ in started)
    assert capsys.readouterr().err == "failed: kernels\n"
    report = (tmp_path / "report.md").read_text()
    assert [line for line in report.splitlines() if line.startswith("## ")] == [
        f"## {name} (0 s, status {int(name == 'kernels')})" for name in NAMES
    ]


def test_a_dry_run_has_no_limits_and_interprets_kernels(started: list[Any], tmp_path: Path) -> None:
    assert gpu_session.main(["--dry-run", "--only", "kernels", "--folder", str(tmp_path)]) == 0
    ((command, environment, limit),) = started
    assert command[command.index("-m") + 1 :][:3] == ["apps.performance.gpu_dry", "gpu_kernels", "--quick"]
    assert (environment["TRITON_INTERPRET"], limit) == ("1", None)


def test_a_program_that_is_not_for_gpus_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_dry.main(["kernels"]) == gpu_dry.main([]) == 2
    assert capsys.readouterr().err == 2 * "error: name one of gpu_kernels, gpu_training, gpu_allreduce\n"


@pytest.mark.timeout(600)
def test_everything_but_the_device_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert gpu_session.main(["--dry-run", "--folder", str(tmp_path)]) == 0, capsys.readouterr().out
    records = {name: read_record(tmp_path / f"{name}.json") for name in NAMES[1:]}
    sides = ["alone", "under DDP", "with Marsit", "with Relay"]
    assert [row["side"] for row in records["training-2-ranks"]["rows"]] == sides
    assert {row["side"] for row in records["training"]["host"]} == {*sides[2:]}
    assert {"hop, 16 levels", "unpack + dequantize + average 4 ranks"} <= {
        row["kernel"] for row in records["kernels"]["rows"]
    }
    assert records["allreduce"]["rows"][0]["call"] == "Marsit on the GPU"
