"""The benchmark of sharded steps: its table."""

from __future__ import annotations

from apps.performance.cluster.sharding import HOOK, NATIVE, table


def test_the_table_has_medians_and_ratios_to_native_hsdp() -> None:
    seconds = {NATIVE: {"median_s": 1.0}, HOOK: {"median_s": 0.25}}
    shape = {"nodes": 2, "ranks_per_node": 2, "parameters": 12000, "tokens": 16, "method": "marsit"}
    text = table({**shape, "seconds": seconds})
    assert text.startswith("2 nodes of 2 ranks, 12,000 parameters, 16 tokens a rank and step, marsit between nodes")
    assert "| native | 1.000 | 1.00 |\n| hook | 0.250 | 4.00 |" in text
