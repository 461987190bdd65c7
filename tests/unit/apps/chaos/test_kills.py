"""Jobs whose ranks are killed are judged against threads that make the same steps."""

from __future__ import annotations

import copy
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.chaos import __main__ as program
from apps.chaos.case import Case
from apps.chaos.job import Ended, Launcher
from apps.chaos.judge import judge
from apps.chaos.kills import run_case, summary
from apps.faults import fail_at
from tests.unit.faults.jobs import JOB_S

pytestmark = pytest.mark.timeout(2 * JOB_S)

FAULTS = fail_at(1, 2, "middle"), fail_at(0, 4, "after-barrier")
CASE = Case(3, 3, 7, 1000, "local-top-k", {"rate": 10}, "ring", FAULTS, sums=1)


@pytest.fixture(scope="module")
def ended() -> Ended:
    """Return the end of a job of which one rank survives."""
    kept: list[Ended] = []

    class Keeping(Launcher):
        def run(self, *args: Any, **options: Any) -> Ended:
            kept.append(super().run(*args, **options))
            return kept[0]

    verdict = run_case(CASE, Keeping(), JOB_S)
    assert not verdict.problem, verdict.text
    return kept[0]


def test_ranks_that_are_copies_of_one_process_die_and_go_on_alike() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short name for a socket
        launcher = Launcher(folder=Path(folder))
        try:
            verdict = run_case(CASE, launcher, JOB_S)
        finally:
            launcher.close()
    assert not verdict.problem, verdict.text
    assert len(verdict.kills) == 2


def test_a_job_that_goes_on_has_timed_kills(ended: Ended) -> None:
    kills = judge(CASE, ended).kills
    assert [kill.fault for kill in kills] == [FAULTS[1], FAULTS[0]]  # by rank
    assert all(kill.seconds > 0 and 0 < kill.lost < 1 for kill in kills)


@pytest.mark.parametrize(
    ("row", "key", "text"),
    [
        (5, "digest", "no group between|replicas differ"),
        (6, "residual", "no group between"),
        (6, "loss", "the loss is 9"),
    ],
)
def test_a_wrong_model_residual_or_loss_is_noticed(ended: Ended, row: int, key: str, text: str) -> None:
    rows = copy.deepcopy(ended.rows)
    steps = [one for one in rows[2] if one["kind"] == "step"]
    steps[row][key] = 9
    verdict = judge(CASE, replace(ended, rows=rows))
    assert verdict.problem == "wrong"
    assert any(part in verdict.text for part in text.split("|")), verdict.text


def test_a_lost_step_a_hang_and_a_failed_launcher_are_noticed(ended: Ended) -> None:
    short = {rank: rows[:-2] for rank, rows in ended.rows.items()}
    assert judge(CASE, replace(ended, rows=short)).problem == "wrong"
    assert judge(CASE, replace(ended, status=None)).problem == "hang"
    assert judge(CASE, replace(ended, status=1)).problem == "error"


@pytest.mark.parametrize(
    ("argv", "most"), [([], program.KILLS), (["--jobs", "500"], math.inf), (["--jobs", "5", "--kills", "3"], 3)]
)
def test_a_number_of_jobs_lifts_the_limit_of_kills(
    argv: list[str], most: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def campaign(draw: object, seeds: object, kills: float, *others: object) -> object:
        limits.append(kills)
        return summary([], 0.0, [0.0])

    monkeypatch.setattr(program, "campaign", campaign)
    assert program.main(["bursts", *argv]) == 0
    assert limits == [most]
