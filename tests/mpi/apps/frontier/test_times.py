"""A job times a local step and a synchronization of each method, and the all-reduces of others."""

from __future__ import annotations

import pytest

from apps.frontier import times
from mpicomp import Dense, Relay


def test_every_method_is_timed_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "ALGORITHMS", {"dense": Dense(), "Relay(4)": Relay(4), "PowerSGD": Dense()})
    monkeypatch.setattr(times, "own_optimizers", lambda task: {})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    found = times.measure("gpt", 2)["seconds"]
    shapes = {name: [len(rounds) for rounds in rows] for name, rows in found.items()}
    expected = {"dense": [2, 2], "Relay(4)": [2, 2], "PowerSGD": [1, 1]}
    assert shapes == expected | {key + end: [1, 1] for key in times.OPEN_MPI for end in ("", times.HALF)}
    assert all(seconds > 0 for rows in found.values() for row in rows for seconds in row)
