"""What holds for all tests: examples that are drawn alike, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Every run and every rank must draw the same examples: no randomness, no stored examples, no clocks.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")

# Triton reads it when it is imported: PyTorch may do that in any test, long before those of the kernels for GPUs.
if not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"
