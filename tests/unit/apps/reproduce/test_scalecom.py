"""ScaleCom tried again: choices and memories that are looked at, bytes, rates, and how claims are judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from apps.records import Record
from apps.reproduce import scalecom
from apps.reproduce.networks import Task, heavy_tailed
from apps.reproduce.scalecom import SGD, Method, bytes_sent, compare, masking
from apps.reproduce.scalecom.bytes_sent import guided, volume
from apps.reproduce.scalecom.job import measure
from apps.reproduce.scalecom.leaders import choices
from apps.reproduce.scalecom.memories import EVERY, distances
from apps.studies.results import Results
from collectives.threads.run_local import run_local
from mpicomp import LocalTopK, ScaleCom

OPTIONS = ("--dataset", "digits", "--optimizer", "sgd", "--lr", "0.1", "--epochs", "1")


def test_a_single_ranks_choice_is_the_true_one() -> None:
    found = choices(ScaleCom(rate=50, exact=True), Task(OPTIONS, 1, train_samples=200, test_samples=50), 0)
    assert found["step"] == [0, 5, 10]
    assert found["missed"] == [0, 0, 0]
    assert found["gamma"] == pytest.approx(found["best"])
    assert all(0 < value < 1 for value in found["gamma"])
    assert found["count"] == 64 * 128 + 128 + 128 * 10 + 10


def test_a_leaders_choice_is_worse_than_the_true_one_and_within_the_bound() -> None:
    found = choices(ScaleCom(rate=50, exact=True), Task(OPTIONS, 3, train_samples=800, test_samples=50), 0)
    assert len(found["step"]) == 4
    assert all(0 < value < 1 for value in found["missed"])
    for gamma, best, bound in zip(found["gamma"], found["best"], found["bound"], strict=True):
        assert best < gamma < bound


def test_looking_does_not_change_the_training() -> None:
    task = Task(OPTIONS, 2, train_samples=400, test_samples=50)
    plain, filtered = (distances(ScaleCom(rate=50, beta=beta), task, 1) for beta in (1.0, 0.1))
    assert plain["step"] == [EVERY, 2 * EVERY]
    assert all(0 < value < 1 for value in plain["distance"])
    assert plain["distance"] != filtered["distance"]
    assert plain == distances(ScaleCom(rate=50), task, 1)
    assert len(distances(LocalTopK(50), task, 1)["distance"]) == 2


def test_a_look_at_the_choice_of_later_steps_takes_in_the_memory() -> None:
    task = Task((*OPTIONS, "--lr", "1e-9"), 1, train_samples=200, test_samples=50)
    found = choices(ScaleCom(rate=50, exact=True), task, 0)
    # Of a sum of several gradients that stay the same, less is lost than of one: the largest have been sent.
    assert found["gamma"][1] > found["gamma"][0]


def test_bytes_and_fill_of_a_step() -> None:
    n, ranks = 6400, 4
    asked = {"n": n, "options": {"rate": 100}}
    rows = {
        name: run_local(ranks, lambda comm, name=name: measure(comm, 2, name, **asked), "ring")[0]
        for name in ("scalecom", "local-top-k")
    }
    assert rows["scalecom"]["filled"] == 1 / 100
    assert 1 / 100 < rows["local-top-k"]["filled"] <= ranks / 100
    values, places = 4 * 64, 7 * 8  # bytes of 64 values and of 7 planes
    assert rows["local-top-k"]["bytes"] == pytest.approx((ranks - 1) * (values + places), abs=100)
    least = 2 * values * (ranks - 1) / ranks + places * (ranks - 1) / ranks
    assert rows["scalecom"]["bytes"] == pytest.approx(least, abs=100)
    assert rows["scalecom"]["busiest"] >= rows["scalecom"]["bytes"]


def test_gradients_share_a_part() -> None:
    a, b = heavy_tailed(20000, 0, 1, (0,)), heavy_tailed(20000, 1, 1, (0,))
    assert 0.4 < np.corrcoef(a, b)[0, 1] < 0.95
    assert not np.array_equal(a, heavy_tailed(20000, 0, 2, (0,)))


def test_volume_is_judged_by_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(constant: bool) -> dict[str, list[bool | None]]:
        def job(function: object, arguments: object, ranks: int) -> dict[str, object]:
            ring = (ranks - 1) / ranks
            own = {"dense": 800 * ring, "ScaleCom": 8 * (ring if constant else ranks), "local top-k": 4.0 * (ranks - 1)}
            return {name: {"bytes": nbytes, "filled": 0.01} for name, nbytes in own.items()}

        monkeypatch.setattr(bytes_sent, "call_on_ranks", job)
        claims, figures = volume(Results(tmp_path, fresh=True), 2, full=False)
        assert all(path.exists() for path in figures)
        return {"holds": [claim.holds for claim in claims]}

    assert measured(constant=True) == {"holds": [True, True, None]}
    assert measured(constant=False) == {"holds": [True, False, None]}


def test_guided_rates_fit_the_model() -> None:
    mlp = guided("mlp")
    assert mlp["elements"] == {"400": 101770}
    assert mlp["tensor_lengths"] == [784 * 128, 128, 128 * 10, 10]
    assert mlp["rates"] == (400, 400, 400, 400)
    assert mlp["kept"] == pytest.approx(101770 / (251 + 1 + 4 + 1))
    convolutional = guided("resnet20")
    assert set(convolutional["elements"]) == {"25", "50", "400"} or set(convolutional["elements"]) == {"25", "400"}
    assert convolutional["kept"] < mlp["kept"]
    ScaleCom(rates=convolutional["rates"])


def test_momentum_within_the_method_is_judged_where_it_is_cleared_at_100x(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Mapping[str, Method]] = {}

    def train_all(
        results: Results, name: str, task: Task, methods: Mapping[str, Method], seeds: int
    ) -> dict[str, list[Record]]:
        asked[name] = methods
        assert task.options[-2:] == ("--optimizer", "momentum")
        ends = {key: 0.85 if key == "masked 100x" and name == "momentum-0.03" else 0.9 for key in methods}
        return {
            key: [{"accuracy": end, "diverged": False, "epochs": [{"accuracy": end}]}] * seeds
            for key, end in ends.items()
        }

    monkeypatch.setattr(scalecom, "all_trained", train_all)
    claims, figures = masking(Results(tmp_path, fresh=True), 5, full=False)
    assert all(path.exists() for path in figures)
    assert [claim.holds for claim in claims if claim.holds is not None] == [True, True, False]
    assert [len(methods) for methods in asked.values()] == [3, 7, 3]
    for methods in asked.values():
        dense, *others = methods.values()
        assert dense[1] == ()
        for method, own in others:
            assert isinstance(method, ScaleCom)
            assert (method.momentum, own) == (0.9, SGD)  # momentum in the method, and none behind the mean


@pytest.mark.parametrize(("ours", "holds"), [([0.904, 0.914, 0.918], True), ([0.90, 0.91, 0.92], False)])
def test_as_accurate_means_surely_less_than_a_point_below(ours: list[float], holds: bool) -> None:
    found = {
        "100x": [{"accuracy": value} for value in ours],
        "dense": [{"accuracy": value} for value in (0.905, 0.915, 0.92)],
    }
    assert compare(found, "100x", "", "", "", "").holds is holds
