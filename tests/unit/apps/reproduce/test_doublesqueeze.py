"""The DoubleSqueeze study: compared methods, bytes by formula, tuning, judging, and times put to curves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.emulator.network import ClusterError
from apps.mpi_jobs import call_on_ranks
from apps.reproduce.doublesqueeze import against_time, job, learning, times
from apps.reproduce.doublesqueeze.job import compare_methods, compare_topologies, take_turns, vector
from apps.reproduce.doublesqueeze.methods import (
    DENSE,
    DS_1BIT,
    DS_TOPK,
    MEM_1BIT,
    METHODS,
    QUANTIZED,
    SPARSE,
    TOPOLOGIES,
    methods,
)
from apps.reproduce.doublesqueeze.times import BYTES_OFF, MODEL, RATES, RESNET_18
from apps.studies.results import Results
from collectives import Communicator
from collectives.threads.run_local import run_local

N = 30_000


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_are_those_of_the_formula(topology: str) -> None:
    rows = run_local(4, lambda comm: compare_methods(comm, topology, N, 2), topology, verify=False)[0]
    assert set(rows) == set(METHODS)
    for name, row in rows.items():
        assert row["bytes"] == pytest.approx(row["formula"], rel=BYTES_OFF), name
    assert rows[DENSE]["bytes"] == rows[DENSE]["formula"]
    assert rows[DS_1BIT]["bytes"] < rows[MEM_1BIT]["bytes"] / 10 < rows[DENSE]["bytes"]


def test_both_topologies_compute_the_same() -> None:
    star, ring = (run_local(3, lambda comm, t=name: compare_methods(comm, t, N, 3), name)[0] for name in TOPOLOGIES)
    for name in set(METHODS) - {DENSE}:  # which adds up in another order
        assert (star[name]["digest"], star[name]["errors"]) == (ring[name]["digest"], ring[name]["errors"])
    assert len({row["digest"] for row in star.values()}) == len(METHODS)


def test_methods_take_turns_and_slow_ones_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ENOUGH_S", 0.4)

    class Slow:
        def aggregate(self, x: Any, out: Any) -> None:
            time.sleep(0.21)

    def timed(comm: Communicator) -> Any:
        started = {"dense": methods()[DENSE].start(comm, 100), "slow": Slow()}
        return take_turns(comm, started, vector(100, comm.rank, 0), np.zeros(100, np.float32), 4)

    rows = run_local(2, timed, "ring")[0]
    assert [rows["dense"]["calls"], rows["slow"]["calls"]] == [4, 2]
    assert rows["slow"]["median_s"] > 0.2


def _runs(ends: dict[str, float]) -> dict[str, Any]:
    """Made runs: losses fall from 1 to an end in two epochs, a little else for each seed."""
    return {
        name: [
            {"epochs": [{"epoch": e, "loss": 1 - (1 - end) * e / 2 + s / 1e4, "accuracy": 0.8} for e in (1, 2)]}
            for s in range(3)
        ]
        for name, end in ends.items()
    }


ENDS = dict.fromkeys(METHODS, 0.4) | {QUANTIZED: 0.6, SPARSE: 0.4}


@pytest.mark.timeout(300)
def test_curves_are_judged_by_their_ends(tmp_path: Path) -> None:
    runs = _runs(ENDS)
    for i, record in enumerate(runs[QUANTIZED]):
        record["epochs"][-1]["loss"] += i / 100
    made = learning.judge(runs, dict.fromkeys(METHODS, 0.1), full=False)
    verdicts = {claim.what: claim.holds for claim in made}
    assert all(holds for what, holds in verdicts.items() if what.startswith("DoubleSqueeze"))
    assert all(holds for what, holds in verdicts.items() if what.startswith(QUANTIZED))
    assert not any(holds for what, holds in verdicts.items() if what.startswith(SPARSE))
    assert all(path.stat().st_size > 5000 for path in learning.draw(runs, tmp_path))


def test_seconds_to_a_loss_lie_between_epochs() -> None:
    assert against_time.seconds_to(0.5, [1.0, 0.6, 0.4], 10.0) == pytest.approx(25)
    assert against_time.seconds_to(1.5, [1.0, 0.6], 10.0) == 10
    assert against_time.seconds_to(0.1, [1.0, 0.6], 10.0) is None


def _times(dense_s: dict[str, float]) -> dict[str, Any]:
    """Made times: ours take 0.1 s, the others what is given for each rate."""
    fast = (DS_1BIT, DS_TOPK)
    return {
        rate: {
            "payload_bits_per_s": 1e8 * (i + 1),
            "times": {
                str(n): {
                    topology: {name: {"median_s": 0.1 if name in fast else dense_s[rate]} for name in METHODS}
                    for topology in TOPOLOGIES
                }
                for n in (MODEL, RESNET_18)
            },
        }
        for i, rate in enumerate(RATES)
    }


def test_times_are_put_to_the_curves() -> None:
    slow_links = dict(zip(RATES, (8.0, 1.0, 0.05), strict=True))
    taken, runs = _times(slow_links), _runs(ENDS)
    steps = learning.steps_per_epoch()
    assert against_time.epoch_seconds(taken, 1.0, "1gbit", MODEL, "star", DENSE) == 2 * steps
    assert against_time.epoch_seconds(taken, 1.0, "1gbit", RESNET_18, "star", DENSE) == 1 * steps
    made = against_time.judge(runs, taken, 0.0, (MODEL, RESNET_18))
    assert [claim.holds for claim in made] == [True] * 8
    assert "QSGD not within 1.02e+03 s; difference from dense" in made[0].ours
    (curve,) = times.judge(taken, full=False)  # one claim of all pairs
    assert curve.holds
    assert curve.ours.startswith(
        "12 of 12 pairs; at 100 Mbit/s, 1 Gbit/s, not limited: DoubleSqueeze, 1-bit over dense"
    )
    taken["1gbit"]["times"][str(RESNET_18)]["ring"][DENSE]["median_s"] = 9.0
    (curve,) = times.judge(taken, full=False)
    assert not curve.holds
    assert curve.ours.startswith("10 of 12 pairs")
    flat = _times(dict.fromkeys(RATES, 0.05))
    assert not any(claim.holds for claim in times.judge(flat, full=False))
    assert not any(claim.holds for claim in against_time.judge(runs, flat, 0.0, (MODEL,)))


@pytest.mark.timeout(300)
def test_curves_against_time_are_drawn(tmp_path: Path) -> None:
    taken = _times(dict.fromkeys(RATES, 1.0))
    drawn = [
        *against_time.draw(_runs(ENDS), taken, 0.0, (MODEL,), tmp_path),
        *times.draw(taken, tmp_path, full=False),
    ]
    assert all(path.stat().st_size > 5000 for path in drawn)


def test_without_emulated_hosts_times_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ClusterError("needs root")

    monkeypatch.setattr(times, "call_on_ranks", refuse)
    found = times.measured(Results(tmp_path), full=False)
    assert found == "needs root"
    (claim,) = times.judge(found, full=False)
    assert (claim.holds, claim.differs) == (None, "needs root")
    assert times.draw(found, tmp_path, full=False) == []


@pytest.mark.timeout(600)
def test_a_job_over_mpi_hands_back_what_it_found() -> None:
    found = call_on_ranks(compare_topologies, {"topologies": ["star"], "n": 5000, "steps": 2}, 2)
    assert set(found["star"]) == set(METHODS)
    assert found["star"][DENSE]["bytes"] == found["star"][DENSE]["formula"]
