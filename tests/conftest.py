"""What holds for all tests."""

from __future__ import annotations

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
