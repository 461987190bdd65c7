"""The program that trains in several ways and compares them."""

from __future__ import annotations

from typing import Any

import pytest

from apps.launch import JobFailed
from apps.train import compare, elsewhere
from apps.train.elsewhere import RATES

N, ROUNDS, RANKS = 1_000_000, 50, 4


def ended(algorithm: str, training_s: float, **options: Any) -> dict[str, Any]:
    """The last epoch of a run that computed for a second less than it trained."""
    return {
        "algorithm": algorithm, "algorithm_options": options, "topology": "auto", "ranks": RANKS, "count": N,
        "rounds_so_far": ROUNDS, "seconds_so_far": training_s, "seconds_communicating_so_far": training_s - 1.0,
        "accuracy": 0.9, "kind": "epoch", "bits_per_element": 1.0, "bytes_so_far_per_rank": 1e6,
    }  # fmt: skip


def free(function: object, arguments: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Speeds of processors for which nothing takes any time."""
    assert 2 <= ranks <= RANKS
    speed = {"work": {}, "call_s": 0.0, "volume": 1.0}
    return {"speeds": [speed] * len(arguments["methods"]), "piece_bytes": 57_344}


def test_elsewhere_a_run_computes_as_here_and_sends_its_bytes_over_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "call_on_ranks", free)
    runs = [ended("dense", 3.0), ended("marsit", 9.0, full_precision_every=None)]
    dense, marsit = elsewhere.seconds_elsewhere(runs)
    assert list(dense) == list(RATES)
    for rate, bytes_s in RATES.items():
        wire_s = ROUNDS * 2 * (RANKS - 1) / RANKS * 4 * N / bytes_s
        latencies_s = ROUNDS * 2 * (RANKS - 1) * elsewhere.LATENCY_S
        assert dense[rate] == pytest.approx(1.0 + wire_s + latencies_s, rel=0.02)
        assert marsit[rate] == pytest.approx(1.0 + wire_s / 32 + latencies_s, rel=0.02)


def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: Any) -> str:
    monkeypatch.setattr(elsewhere, "call_on_ranks", job)
    of_methods = {"dense": {}, "marsit-100": {"full_precision_every": 100}, "marsit": {"full_precision_every": None}}
    runs = [
        (title, [ended(stem.partition("-")[0], 3.0, **of_methods.get(stem, {}))])
        for stem, title, _ in compare.RUNS if stem != "cascading"
    ]  # fmt: skip
    compare._show_elsewhere(compare.Console(width=200), [*runs, (compare.RUNS[-1][1], [{"kind": "diverged"}])])
    return capsys.readouterr().out


def test_the_comparison_says_what_a_network_would_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = show(monkeypatch, capsys, free)
    assert "No network lies between them" in told
    assert "100 Mbit/s: Marsit, K = none, 14.2 times as fast as dense; 1 Gbit/s: Marsit, K = none, 3.1 times" in told


def test_a_prediction_that_fails_does_not_fail_the_comparison(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(*arguments: object) -> dict[str, Any]:
        raise JobFailed("the job ended with status 1")

    assert "was not predicted: the job ended with status 1" in show(monkeypatch, capsys, job)


def test_where_little_is_gained_dense_is_taken() -> None:
    dense, _, marsit, failure = (title for _, title, _ in compare.RUNS)
    found = {dense: dict.fromkeys(RATES, 1.0), marsit: dict.fromkeys(RATES, 0.96), failure: dict.fromkeys(RATES, 0.1)}
    assert compare._fastest(found).startswith("so take, on links of 100 Mbit/s: dense; 1 Gbit/s: dense; 10 Gbit/s: d")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0", "--ranks: 0 is not at least 1"),
        ("-2", "--ranks: -2 is not at least 1"),
        ("2.5", "--ranks: '2.5' is not a whole number"),
        ("1000000", "--ranks: 1000000 are more than 16 for each core of this machine"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(
    ranks: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(["--ranks", ranks])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
