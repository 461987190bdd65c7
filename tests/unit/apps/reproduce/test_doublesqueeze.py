"""The DoubleSqueeze study: what is compared, bytes by formula, tuning, judging, and times put to curves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.emulator.network import ClusterError
from apps.reproduce import doublesqueeze, mpi_jobs
from apps.reproduce.claims import Difference
from apps.reproduce.doublesqueeze import job, times
from apps.reproduce.doublesqueeze.job import compare_form, take_turns, vector
from apps.reproduce.doublesqueeze.learning import as_good, claims_of, draw
from apps.reproduce.doublesqueeze.methods import (
    DENSE,
    DS_1BIT,
    DS_TOPK,
    FORMS,
    MEM_1BIT,
    METHODS,
    QUANTIZED,
    SPARSE,
    bytes_of_all,
    methods,
)
from apps.reproduce.doublesqueeze.times import MODEL, RATES, RESNET_18, WORD, word
from apps.reproduce.results import Book
from collectives import Communicator
from collectives.threads.run_local import run_local

N = 30_000


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_the_formula(form: str) -> None:
    rows = run_local(4, lambda comm: compare_form(comm, form, N, 2), form, verify=False)[0]
    assert set(rows) == set(METHODS)
    told = {name: word(row, 4) for name, row in rows.items()}
    assert told.pop(DENSE) == 0
    assert set(told.values()) <= {1, WORD}
    assert len(set(told.values())) == 1
    assert rows[DS_1BIT]["bytes"] < rows[MEM_1BIT]["bytes"] / 10 < rows[DENSE]["bytes"]


def test_the_formula_counts_both_passes() -> None:
    assert bytes_of_all(DENSE, "star", [1000], 4) == 2 * 3 * 4000
    code = 8 + 4096 // 8  # a scale, padded, and a bit for each element
    assert bytes_of_all(DS_1BIT, "star", [4096, 4096], 4) == 3 * 4 * code
    assert bytes_of_all(MEM_1BIT, "ring", [4096], 3) == 2 * (code + 4 * 4096)
    assert bytes_of_all(QUANTIZED, "star", [4096], 3) == 2 * (8 + 2 * 4096 // 8 + 4 * 4096)
    assert bytes_of_all(QUANTIZED, "ring", [4096], 3) == 3 * 2 * (8 + 2 * 4096 // 8)


def test_both_forms_compute_the_same() -> None:
    star, ring = (run_local(3, lambda comm, f=form: compare_form(comm, f, N, 3), form)[0] for form in FORMS)
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


def test_as_good_is_surely_below_the_margin() -> None:
    assert as_good(Difference(0.01, 0.005), 0.02)
    assert as_good(Difference(-0.5, 0.1), 0.02)
    assert not as_good(Difference(0.01, 0.02), 0.02)


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
    made = claims_of(runs, dict.fromkeys(METHODS, 0.1), full=False)
    verdicts = {claim.what: claim.holds for claim in made}
    assert all(holds for what, holds in verdicts.items() if what.startswith("DoubleSqueeze"))
    assert all(holds for what, holds in verdicts.items() if what.startswith(QUANTIZED))
    assert not any(holds for what, holds in verdicts.items() if what.startswith(SPARSE))
    assert all(path.stat().st_size > 5000 for path in draw(runs, tmp_path))


def test_seconds_to_a_loss_lie_between_epochs() -> None:
    assert doublesqueeze.seconds_to(0.5, [1.0, 0.6, 0.4], 10.0) == pytest.approx(25)
    assert doublesqueeze.seconds_to(1.5, [1.0, 0.6], 10.0) == 10
    assert doublesqueeze.seconds_to(0.1, [1.0, 0.6], 10.0) is None


def _times(dense_s: dict[str, float]) -> dict[str, Any]:
    """Made times: ours take 0.1 s, the others what is given for each rate."""
    fast = (DS_1BIT, DS_TOPK)
    return {
        rate: {
            "payload_bits_per_s": 1e8 * (i + 1),
            "times": {
                str(n): {
                    form: {name: {"median_s": 0.1 if name in fast else dense_s[rate]} for name in METHODS}
                    for form in FORMS
                }
                for n in (MODEL, RESNET_18)
            },
        }
        for i, rate in enumerate(RATES)
    }


def test_times_are_put_to_the_curves() -> None:
    slow_links = dict(zip(RATES, (8.0, 1.0, 0.05), strict=True))
    taken, runs = _times(slow_links), _runs(ENDS)
    assert doublesqueeze.step_s(taken, 1.0, "1gbit", MODEL, "star", DENSE) == 2
    assert doublesqueeze.step_s(taken, 1.0, "1gbit", RESNET_18, "star", DENSE) == 1
    made = doublesqueeze.against_time(runs, taken, 0.0, (MODEL, RESNET_18))
    assert [claim.holds for claim in made] == [True] * 8
    assert "QSGD 1.02e+03 s (not reached by 3 seeds)" in made[0].ours
    assert all(claim.holds for claim in times.claims_of(taken, full=False))
    flat = _times(dict.fromkeys(RATES, 0.05))
    assert not any(claim.holds for claim in times.claims_of(flat, full=False))
    assert not any(claim.holds for claim in doublesqueeze.against_time(runs, flat, 0.0, (MODEL,)))


@pytest.mark.timeout(300)
def test_curves_against_time_are_drawn(tmp_path: Path) -> None:
    taken, runs = _times(dict(zip(RATES, (8.0, 1.0, 0.05), strict=True))), _runs(ENDS)
    drawn = [
        *doublesqueeze.draw(runs, taken, 0.0, (MODEL, RESNET_18), tmp_path),
        *times.draw(taken, tmp_path, full=False),
    ]
    assert all(path.stat().st_size > 5000 for path in drawn)


def test_without_emulated_hosts_times_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ClusterError("needs root")

    monkeypatch.setattr(times, "on_hosts", refuse)
    found = times.measured(Book(tmp_path), full=False)
    assert found == "needs root"
    (claim,) = times.claims_of(found, full=False)
    assert (claim.holds, claim.differs) == (None, "needs root")
    assert times.draw(found, tmp_path, full=False) == []


@pytest.mark.timeout(600)
def test_a_job_over_mpi_hands_back_what_it_found() -> None:
    request = {"part": "forms", "n": 5000, "steps": 2, "forms": ["star"]}
    found = mpi_jobs.on_this_machine(2, times.JOB, request)
    assert set(found["forms"]["star"]) == set(METHODS)
    assert word(found["forms"]["star"][DENSE], 2) == 0


def test_a_job_that_finds_nothing_is_told() -> None:
    with pytest.raises(mpi_jobs.JobFailed, match=r"found\.json"):
        mpi_jobs.on_this_machine(1, "this", {})
