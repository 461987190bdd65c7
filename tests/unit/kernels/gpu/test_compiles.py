"""Every kernel compiles for a real GPU, as it is launched: here without one, and not by the interpreter.

By default in the first variant that tests launch it in, and the first with other arguments left out, for NVIDIA's H100.
``MPICOMP_COMPILE_ALL=1`` has every variant compiled, for AMD's MI300 too, which takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[3]
ALL = os.environ.get("MPICOMP_COMPILE_ALL") == "1"
LONGEST_S = 1800 if ALL else 280


@pytest.mark.timeout(LONGEST_S + 20)
@pytest.mark.parametrize("target", ["cuda", "hip"] if ALL else ["cuda"])
def test_every_kernel_compiles_for_a_gpu_as_it_is_launched(
    target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Machine code of kernels that have not changed is kept: Triton names it by all that it was compiled from.
    kept = getattr(request.config, "cache", None)
    cache = tmp_path if kept is None else kept.mkdir("triton")
    tests = sorted(str(one) for one in HERE.glob("test_*.py") if "on_device" not in one.name and one != Path(__file__))
    report = tmp_path / "compiled.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "MPICOMP_COMPILE_FOR": target, "MPICOMP_COMPILED": str(report), "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=no",
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    command += ["-p", "tests.unit.kernels.gpu.compile_only", *tests]
    run = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert report.exists(), run.stdout[-3000:] + run.stderr[-3000:]
    found = json.loads(report.read_text())
    assert found["failed"] == {}
    assert found["left_out"] == []
    assert found["compiled"]
