"""Tests of the comparison of two checkouts call by call."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.performance import turn_by_turn
from apps.performance.turn_by_turn import CALLS, PROJECT, main, measure
from apps.performance.turn_by_turn import _parser as parser
from apps.records import read_record


class OfSeconds:
    """A job whose calls take the given seconds, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self.left, self.counts = list(seconds), set[int]()

    def time(self, name: str, count: int) -> float:
        self.counts.add(count)
        return self.left.pop(0)


def test_a_ratio_is_the_median_of_the_rounds_behind_the_warm_ups() -> None:
    jobs = {"old": OfSeconds(9.0, 2.0, 4.0, 9.0), "new": OfSeconds(1.0, 1.0, 4.0, 3.0)}
    options = parser().parse_args(["--rounds", "3", "--warm-ups", "1"])
    row = measure(jobs, "step, dense", options)  # type: ignore[arg-type]
    assert (row["old"], row["new"], row["ratio"]) == (4.0, 3.0, 2.0)
    assert (row["old_us"], row["new_us"]) == ([2e6, 4e6, 9e6], [1e6, 4e6, 3e6])
    assert jobs["old"].counts == {1}


def test_a_turn_has_many_short_calls() -> None:
    jobs = {"old": OfSeconds(2.0, 2.0), "new": OfSeconds(1.0, 1.0)}
    options = parser().parse_args(["--rounds", "2", "--warm-ups", "0"])
    assert measure(jobs, "256 elements, dense", options)["ratio"] == 2  # type: ignore[arg-type]
    assert jobs["new"].counts == {CALLS[256]}


@pytest.mark.timeout(180)
def test_two_jobs_of_one_checkout_make_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(turn_by_turn.CALLS, 256, 3)
    main(
        ["--old", str(PROJECT), "--ranks", "2", "--rounds", "2", "--warm-ups", "1", "--json", str(tmp_path / "a.json")]
    )
    rows = read_record(tmp_path / "a.json")["rows"]
    assert [row["key"][1:] for row in rows] == [
        ["2 ranks", f"256 elements, {name}"] for name in ("dense", "marsit", "qsgd", "scalecom")
    ]
    assert all(len(row["new_us"]) == 2 and min(row["new_us"]) > 0 for row in rows)


def test_a_job_that_cannot_begin_ends_the_comparison(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "env.sh").write_text("")
    (tmp_path / "mpicomp.py").write_text("raise SystemExit('no such package')")
    with pytest.raises(SystemExit, match="a job has ended with status"):
        main(["--old", str(tmp_path), "--ranks", "1", "--rounds", "2"])
