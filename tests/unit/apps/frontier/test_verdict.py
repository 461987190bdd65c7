"""The verdict: seconds to a goal follow from curves, local steps and step times, and dense is the best dense."""

from __future__ import annotations

from typing import Any

import pytest

from apps.frontier import learning, times, verdict
from apps.frontier.__main__ import PAGE, RECORDS
from apps.frontier.cases import DENSE
from apps.frontier.tasks import TASKS
from apps.frontier.times import OUR_DENSE
from apps.frontier.verdict import Learned
from apps.records import Record, read_record

GPT, CNN = TASKS["gpt"], TASKS["cnn"]
TIMES = {DENSE: (0.1, 0.5), OUR_DENSE: (0.1, 0.5), "Relay(4)": (0.1, 0.2)}


def run(method: str, local_steps: int, seed: int, scores: list[float], **other: Any) -> Record:
    """A run of the record of learning."""
    settings = {"task": "gpt", "steps": GPT.steps, "ranks": 4, "method": method, "local_steps": local_steps}
    return {"settings": {**settings, "seed": seed, **other}, "result": {"scores": scores, "bytes": 1e6}}


def test_a_goal_between_two_evaluations_is_interpolated() -> None:
    one = Learned(DENSE, 0, 4, [[3.0, 2.0, 1.0], [3.2, 2.2, 1.2]], 0.0)
    assert verdict.steps_to(one, GPT, 1.6 - verdict.TOLERANCE[GPT.score]) == pytest.approx(250)
    assert verdict.steps_to(one, GPT, 4.0) == GPT.evaluated
    assert verdict.steps_to(one, GPT, 1.0) is None


def test_an_accuracy_is_reached_from_below() -> None:
    one = Learned(DENSE, 0, 4, [[70.0, 80.0]], 0.0)
    assert verdict.steps_to(one, CNN, 75 + verdict.TOLERANCE[CNN.score]) == pytest.approx(150)
    assert verdict.steps_to(one, CNN, 81.0) is None


def test_one_in_h_steps_has_a_synchronization() -> None:
    assert verdict.seconds(Learned("Relay(4)", 10, 4, [], 0.0), GPT, 100, TIMES) == pytest.approx(11.0)
    assert verdict.seconds(Learned(DENSE, 0, 4, [], 0.0), GPT, 100, TIMES) == pytest.approx(50.0)
    assert verdict.seconds(Learned("not timed", 10, 4, [], 0.0), GPT, 100, TIMES) is None


def test_a_warm_up_takes_as_long_as_dense_steps_and_local_steps_exchange_nothing() -> None:
    times = dict.fromkeys(("1-bit Adam", "0/1 Adam", "Marsit, K = 100"), (0.1, 0.2))
    times |= {DENSE: (0.1, 0.4), OUR_DENSE: (0.1, 0.5)}
    assert verdict.seconds(Learned("1-bit Adam", 0, 4, [], 0.0), GPT, 130.5, times) == pytest.approx(60 + 2.1)
    whole = verdict.seconds(Learned("0/1 Adam", 0, 4, [], 0.0), GPT, 600, times)
    # v: 16 updates, 16 in every second step, 16 in every fourth, one; then exchanges in all, every 2, 4 and 8 steps
    exact, own = 16 + 16 + 16 + 1, 120 - 49 + 120 + 60 + 30 + 15 + 1  # and one for the evaluation after step 500
    assert whole == pytest.approx(0.5 * exact + 0.2 * own + 0.1 * (600 - exact - own))
    mean = 0.99 * 0.2 + 0.01 * 0.5
    assert verdict.seconds(Learned("Marsit, K = 100", 0, 4, [], 0.0), GPT, 150, times) == pytest.approx(150 * mean)


def test_dense_has_the_step_of_the_fastest_dense_loop() -> None:
    seconds = {DENSE: [[0.1, 0.5]], "Relay(4)": [[0.12, 0.2]], "MPI ring": [[0.4]], "Gloo": [[0.36]]}
    found = times.step_seconds({"seconds": seconds})
    assert found[DENSE] == pytest.approx((0.11, 0.36))
    assert found["Relay(4)"] == pytest.approx((0.11, 0.2))
    assert times.step_seconds({"seconds": {**seconds, "Gloo": [[0.6]], "MPI ring": [[0.6]]}})[DENSE][1] == 0.5
    halves = {**seconds, "float16": [[0.11, 0.45]], "MPI ring, 16 bits": [[0.3]], "Gloo, 16 bits": [[0.26]]}
    found = times.step_seconds({"seconds": halves})
    assert [found[DENSE], found["float16"]] == [pytest.approx((0.11, 0.36)), pytest.approx((0.11, 0.26))]
    assert not any("bits" in name for name in found)


def test_methods_are_judged_by_the_seeds_that_all_have() -> None:
    runs = [run(DENSE, 10, seed, [2.0, 1.0 + seed]) for seed in (0, 1)]
    runs += [run("Relay(4)", 10, seed, [2.0, 1.01 + seed]) for seed in (0, 1)]
    runs += [run("Marsit", 10, 0, [2.0, 1.1]), run("Relay(4)", 10, 0, [9.0], ranks=8), run(DENSE, 0, 0, [9.0], lr=1)]
    measured = {"seconds": {DENSE: [[0.1, 0.5]], "Relay(4)": [[0.1, 0.2]], "Gloo": [[1.0]]}}
    found = verdict.judge({"runs": runs}, GPT, (0, 1), {"1gbit": measured})
    assert [row["method"] for row in found["rows"]] == [DENSE, "Relay(4)"]
    assert found["rows"][1]["prices"] == pytest.approx([0.01, 0.01])
    (goal,) = found["ranking"]
    assert (goal["goal_of"], goal["goal"]) == (10, 1.5)
    text = verdict.table(found)
    assert "| Relay(4), H = 10 | 1.510 | +0.010 (+0.010 to +0.010) | 1 |" in text
    assert (
        "| dense, every 10 steps: 1.500 | 1 Gbit/s | dense, H = 10: 27.7 s | Relay(4), H = 10: 22.0 s | 1.26 |" in text
    )


def test_a_goal_that_nothing_compressed_reaches_has_no_factor() -> None:
    ranking = {"rate": "1gbit", "goal_of": 10, "goal": 1.0, "seconds": {"dense, H = 10": 3.0, "float16": 2.0}}
    assert verdict.best(ranking, True) == ("float16", 2.0)
    assert verdict.best(ranking, False) is None
    assert "| not reached |  |" in verdict.table({"task": "gpt", "rows": [], "ranking": [ranking]})


def test_runs_on_more_ranks_have_a_price_of_their_own_and_no_time() -> None:
    runs = [run(DENSE, 10, 0, [2.0, 1.5]), run(DENSE, 10, 0, [2.0, 1.4], ranks=8)]
    runs += [run("Relay(4)", 10, 0, [2.0, 1.42], ranks=8)]
    measured = {"seconds": {DENSE: [[0.1, 0.5]], "Relay(4)": [[0.1, 0.2]], "Gloo": [[1.0]]}}
    found = verdict.judge({"runs": runs}, GPT, (0,), {"1gbit": measured})
    assert "| Relay(4), H = 10, 8 ranks | 1.420 | +0.020 (+0.020 to +0.020) | 1 |" in verdict.table(found)
    assert [list(one["seconds"]) for one in found["ranking"]] == [["dense, H = 10"]]


def test_two_runs_of_one_case_and_seed_are_refused() -> None:
    settings = {"task": "gpt", "steps": GPT.steps, "ranks": 4, "method": DENSE, "local_steps": 10, "seed": 0}
    runs = [{"settings": {**settings, "lr": lr}, "result": {"scores": [1.0], "bytes": 1.0}} for lr in (0.1, 0.2)]
    with pytest.raises(ValueError, match="two runs"):
        verdict.learned({"runs": runs}, GPT, [0])


@pytest.mark.parametrize("task", TASKS)
def test_the_page_has_the_tables_of_the_records(task: str) -> None:
    measured = read_record(RECORDS / f"times-{task}.json")
    found = verdict.judge(read_record(learning.RECORD), TASKS[task], range(3), measured)
    assert f"<!-- begin {task} -->\n{verdict.table(found)}" in PAGE.read_text()
