"""Overlap at several rates, and at the one where wire and computing take equally long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from apps.cluster.network import ClusterError
from benchmarks.cluster.drive import measure_alone, tell
from benchmarks.cluster.figures import crossing
from benchmarks.cluster.grid import Net

N, REPEATS = 25_000_000, 25
NETS = (Net(4, "1gbit"), *(Net(2, rate) for rate in ("500mbit", "1gbit", "2gbit", "4gbit", "8gbit", "none")))


def run(folder: Path, fresh: bool, n: int = N, repeats: int = REPEATS) -> list[str]:
    """Measure what is missing; returns what failed."""
    failed = []
    records = []
    for net in NETS:
        try:
            record = _one(net, folder / f"overlap-{net.name}.json", fresh, n, repeats)
        except ClusterError as error:
            failed.append(f"overlap, {net.name}: {error}")
            continue
        if net.nodes == 2:
            records.append(record)
    balanced_mbit = balance([(rate_of(record), record["wire_s"] / record["compute_s"]) for record in records])
    if balanced_mbit is None:
        return [*failed, "overlap: no rate found at which wire and computing take equally long"]
    try:
        _one(Net(2, f"{balanced_mbit}mbit"), folder / "overlap-balanced.json", fresh, n, repeats)
    except ClusterError as error:
        failed.append(f"overlap, {balanced_mbit} Mbit/s: {error}")
    return failed


def rate_of(record: dict[str, Any]) -> float:
    """Payload bits per second that the slowest link of a record carried."""
    return float(min(link["bits_per_s"] for link in record["links"]))


def balance(points: list[tuple[float, float]]) -> int | None:
    """The rate in Mbit/s where the quotient is 1, from (bits per second of payload, wire over compute)."""
    found = crossing(points)
    return None if found is None else round(found / 0.956 / 1e6)


def _one(net: Net, path: Path, fresh: bool, n: int, repeats: int) -> dict[str, Any]:
    if path.exists() and not fresh:
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    tell(f"overlap: {net.nodes} nodes, {net.links}")
    return measure_alone("overlap", net, path, n=n, repeats=repeats)
