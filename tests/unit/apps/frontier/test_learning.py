"""Learning: all methods have the same tuning, no run is made twice, and none begins after the deadline."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.frontier import learning
from apps.frontier.cases import DENSE, GRADIENTS, OUTER, OUTER_PAIRS, Case, cases_of, make_optimizer
from apps.frontier.tasks import TASKS, Batch
from apps.records import Record, write_record
from apps.studies.results import Results
from collectives.errors import NonFiniteGradient
from collectives.threads.run_local import run_local

CASES = [Case("gpt", DENSE, 10), Case("gpt", DENSE, 30), *(Case("gpt", "Relay(4)", steps) for steps in (10, 0, 1))]
BEST = {(DENSE, 10): 1e-3, ("Relay(4)", 10): 4e-3, ("Relay(4)", 0): 2e-3, ("Relay(4)", 1): 1e-3}
Made = list[tuple[Case, float, int, int]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The runs that were made: stand-ins, whose score is the distance from the method's best rate."""
    runs: Made = []

    def run(case: Case, lr: float, seed: int, steps: int) -> Record:
        runs.append((case, lr, seed, steps))
        return {"scores": [9.0, abs(lr - BEST[case.method, min(case.local_steps, 10)])], "bytes": 1.0, "elements": 1}

    monkeypatch.setattr(learning, "run", run)
    monkeypatch.setattr(learning, "run_parallel", lambda runs: {key: run() for key, run in runs.items()})
    monkeypatch.setattr(learning, "cases_of", lambda task: CASES)
    monkeypatch.setattr(learning, "RECORD", Path("/nonexistent"))
    return runs


def test_rates_are_chosen_on_a_seed_of_their_own_for_all_local_steps(tmp_path: Path, made: Made) -> None:
    found = learning.study(Results(tmp_path), "gpt", 2, 60.0)
    gpt = TASKS["gpt"]
    tuning = [(case.method, case.local_steps, lr) for case, lr, seed, steps in made if seed == learning.TUNING_SEED]
    assert sorted(tuning) == sorted((method, steps, lr) for method, steps in BEST for lr in gpt.rates)
    final = [one for one in made if one[2] != learning.TUNING_SEED]
    assert {(case, lr) for case, lr, _, _ in final} == {
        (case, BEST[case.method, min(case.local_steps, 10)]) for case in CASES
    }
    assert [seed for _, _, seed, _ in final] == [0] * 5 + [1] * 5
    assert {steps for *_, steps in final} == {gpt.steps}
    assert len(found["runs"]) == len(made)


def test_runs_of_the_record_are_not_made_again(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "learning.json"
    write_record(record, learning.study(Results(tmp_path / "old"), "gpt", 2, 60.0))
    made.clear()
    monkeypatch.setattr(learning, "RECORD", record)
    found = learning.study(Results(tmp_path / "new"), "gpt", 3, 60.0)
    assert {seed for _, _, seed, _ in made} == {2}
    assert len(made) == len(CASES)
    assert len(found["runs"]) == 3 * len(BEST) + 3 * len(CASES)


def test_no_run_begins_after_the_deadline(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *[1.0] * 4])
    monkeypatch.setattr(time, "time", lambda: next(clock, 61.0))
    found = learning.study(Results(tmp_path), "gpt", 2, 1.0)
    assert len(made) == len(found["runs"]) == 4
    assert {case.method for case, *_ in made} == {DENSE, "Relay(4)"}


def test_a_rate_whose_runs_diverge_is_not_chosen(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Case, lr: float, seed: int, steps: int) -> Record:
        return {"scores": [float("nan") if lr < 4e-3 else 3.0], "bytes": 1.0, "elements": 1}

    monkeypatch.setattr(learning, "run", run)
    assert learning.tuned(Results(tmp_path), CASES[:1], time.time() + 60) == {(DENSE, 10): 4e-3}


@pytest.mark.parametrize("task", TASKS)
def test_dense_and_relay_are_the_first_cases(task: str) -> None:
    cases = cases_of(task)
    assert {DENSE, "Relay(4)"} <= {case.method for case in cases[: learning.BLOCK]}
    assert len(set(cases)) == len(cases)


def test_a_training_that_diverges_has_the_worst_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*arguments: object) -> None:
        raise NonFiniteGradient("NaN", (0,))

    monkeypatch.setattr(learning, "train", diverge)
    for task, score in (("gpt", 100.0), ("cnn", 0.0)):
        case = Case(task, DENSE, 1, ranks=1)
        assert learning.run(case, 1.0, 0, 2 * TASKS[task].evaluated)["scores"] == [score, score]


def test_pairs_of_outer_optimizers_are_chosen_at_the_best_rate_without_one(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = Case("gpt", DENSE + OUTER, 30)

    def run(case: Case, lr: float, seed: int, steps: int) -> Record:
        made.append((case, lr, seed, steps))
        score = abs(lr - BEST[case.base, 10]) if case.outer is None else abs(case.outer[1] - 0.6)
        return {"scores": [9.0, score], "bytes": 1.0, "elements": 1}

    monkeypatch.setattr(learning, "run", run)
    monkeypatch.setattr(learning, "cases_of", lambda task: [Case("gpt", DENSE, 10), outer])
    found = learning.study(Results(tmp_path), "gpt", 2, 60.0)
    rate = BEST[DENSE, 10]
    tried = [(case.outer, lr) for case, lr, seed, _ in made if case.outer and seed == learning.TUNING_SEED]
    assert tried == [(pair, rate) for pair in OUTER_PAIRS]
    final = [(case, lr, seed) for case, lr, seed, _ in made if case.local_steps == 30]
    assert final == [(replace(outer, outer=(0.7, 0.6)), rate, seed) for seed in (0, 1)]
    assert len(found["runs"]) == len(made)
    again = len(made)
    learning.study(Results(tmp_path), "gpt", 2, 60.0)
    assert len(made) == again


@pytest.mark.parametrize(
    ("task", "method", "factor"), [("cnn", "EF21", 10.0), ("gpt", "Lion", 0.2), ("gpt", DENSE, 1.0)]
)
def test_a_method_trains_at_its_own_multiple_of_the_rate(
    task: str, method: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def make(*of_case: Any) -> Any:
        optimizer = make_optimizer(*of_case)
        monkeypatch.setattr(optimizer, "step", lambda: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer

    monkeypatch.setattr(learning, "make_optimizer", make)
    run_local(1, lambda comm: learning.train(comm, Case(task, method, GRADIENTS, ranks=1), 0.01, 0, 1))
    assert rates == [pytest.approx(0.01 * factor)]


def test_bytes_of_a_warm_up_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """1-bit Adam's first steps send exact means, by other aggregators than the later ones."""

    def build(seed: int) -> torch.nn.Module:
        model = torch.nn.Linear(4, 300)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return model

    gpt = replace(TASKS["gpt"], build=build, evaluate=lambda model: 0.0)
    batch = Batch(torch.ones(2, 4), torch.ones(2).long())
    monkeypatch.setitem(TASKS, "gpt", replace(gpt, draw=lambda *_: batch))
    monkeypatch.setattr(learning, "task_loss", torch.nn.functional.cross_entropy)
    with_warm_up, dense = (
        learning.run(Case("gpt", name, 0, 2), 1e-3, 0, 10)["bytes"] for name in ("1-bit Adam", DENSE)
    )
    assert 0.2 * dense < with_warm_up < 0.5 * dense
