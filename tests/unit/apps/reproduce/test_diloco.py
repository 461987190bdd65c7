"""The study of local steps in one bit: its runs, the search for settings, and its verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.pipeline.model import Shape
from apps.pipeline.text import Corpus, load
from apps.records import Record
from apps.reproduce import diloco
from apps.reproduce.claims import Claim
from apps.reproduce.diloco import DENSE, EXACT, GRADIENTS, MARSIT, PLAIN, WINNERS, Case
from apps.studies.results import Results
from collectives.threads.run_local import run_local


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(diloco, "SHAPE", Shape(layers=1, width=16, heads=2, context=16))
    monkeypatch.setattr(diloco, "EVALUATED", 10)
    return


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load(None, 6_000, 16)


def trained(corpus: Corpus, case: Case, steps: int = 20) -> Record:
    return run_local(2, lambda comm: diloco.train(comm, corpus, case, 0, steps), "ring")[0]


def test_a_run_learns_and_sends_a_tenth_of_the_bytes_with_ten_local_steps(corpus: Corpus) -> None:
    every, tenth = trained(corpus, Case(DENSE, 1, 0.01)), trained(corpus, Case(DENSE, 10, 0.01))
    assert len(tenth["losses"]) == 2
    assert tenth["losses"][1] < tenth["losses"][0]
    assert every["bytes"] == pytest.approx(10 * tenth["bytes"], rel=0.05)
    assert tenth["bytes"] == pytest.approx(2 * 4 * tenth["elements"], rel=0.05)  # two means, on a ring of two ranks
    marsit = trained(corpus, Case(MARSIT, 10, 0.01))
    assert marsit["bytes"] < tenth["bytes"] / 10


def test_mean_gradients_are_one_optimizers_steps(corpus: Corpus) -> None:
    gradients, updates = trained(corpus, Case(GRADIENTS, 1, 0.01)), trained(corpus, Case(DENSE, 1, 0.01))
    assert gradients["losses"] != updates["losses"]
    assert gradients["bytes"] == pytest.approx(updates["bytes"], rel=0.05)


def test_an_outer_optimizer_takes_part(corpus: Corpus) -> None:
    plain, outer = trained(corpus, Case(DENSE, 10, 0.01)), trained(corpus, Case(DENSE, 10, 0.01, (0.5, 0.6)))
    assert outer["losses"] != plain["losses"]


def made(last: float, sent: float = 1e6) -> Record:
    return {"losses": [4.0, last], "bytes": sent, "elements": 7}


def test_the_best_settings_are_those_with_the_lowest_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Case, seed: int, steps: int) -> Record:
        assert (seed, steps) == (diloco.TUNING_SEED, 20)
        return made(2 + abs(case.lr - 1e-3) + abs(case.outer[1] - 0.6) + (case.outer[0] == 0.7))

    monkeypatch.setattr(diloco, "run", run)
    monkeypatch.setattr("apps.studies.parallel.os.cpu_count", lambda: 1)  # here, not in processes without `run`
    results = Results(tmp_path)
    rates = diloco.with_marsit(diloco.tune_rates(results, EXACT[1:], 20))
    assert {case.lr for case in rates} == {1e-3}
    best, claims = diloco.tune_outer(results, rates, 20)
    assert [(case.method, case.local_steps) for case in best] == [(DENSE, 10), (DENSE, 30), (MARSIT, 10), (MARSIT, 30)]
    assert {case.outer for case in best} == {(0.5, 0.6)}
    assert claims[0].ours.startswith("(1, 0) 2.600, (0.5, 0.6) 2.000, (0.7, 0.6) 3.000")
    assert {claim.holds for claim in claims} == {None}
    both = diloco.with_winners(best)
    assert [case.method for case in both[len(best) :]] == [WINNERS, WINNERS]
    assert {(case.lr, case.outer) for case in both} == {(1e-3, (0.5, 0.6))}


def test_single_steps_have_one_learning_rate() -> None:
    found = diloco.with_marsit([Case(GRADIENTS, 1, 0.5), Case(DENSE, 10, 0.25)])
    assert [(case.method, case.local_steps, case.lr) for case in found[2:]] == [
        (DENSE, 1, 0.5), (MARSIT, 10, 0.25), (MARSIT, 1, 0.5)
    ]  # fmt: skip


def test_a_run_that_does_not_end_in_a_number_is_the_worst() -> None:
    assert diloco.score(made(float("nan"))) == -float("inf") < diloco.score(made(100.0))


def verdicts(above: dict[tuple[str, int], float], spread: float = 0.001) -> dict[str, Claim]:
    cases = diloco.with_winners(diloco.with_marsit(EXACT))
    found = {
        case: [
            made(1.5 + seed + above.get((case.method, case.local_steps), 0.0) + spread * seed * (case.method != DENSE))
            for seed in range(3)
        ]
        for case in cases
    }
    return {claim.what: claim for claim in diloco.judge(found, 20, "tuned")}


def test_one_bit_is_judged_by_the_whole_interval() -> None:
    claims = verdicts({(MARSIT, 10): 0.02, (MARSIT, 30): 0.07, (WINNERS, 10): 0.029, (WINNERS, 30): 0.05})
    holds = [claim.holds for what, claim in claims.items() if "ends within" in what]
    assert holds == [True, False, False, True]  # the mean of the third, 0.03, is below its margin by too little
    assert "4 ranks, 3 seeds" in next(iter(claims.values())).differs


def test_costs_are_reported_without_a_verdict() -> None:
    claims = verdicts({(MARSIT, 1): 0.1, (GRADIENTS, 1): -0.2})
    assert "difference +0.101" in claims["H = 1: the cost of one bit"].ours
    assert "difference +0.199" in claims["H = 30: the cost of local steps, averaged in full"].ours
    assert {claim.holds for what, claim in claims.items() if "the cost of" in what} == {None}


def test_results_of_other_outer_optimizers_are_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diloco, "run", lambda case, seed, steps: made(case.outer[1]))
    results = Results(tmp_path)
    for outer in (PLAIN, (0.7, 0.9), PLAIN):
        assert diloco.kept(results, Case(DENSE, 10, outer=outer), 0, 20)["losses"][-1] == outer[1]
    assert len(list(tmp_path.glob("*.json"))) == 2
