"""Plots of recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from apps.train.plot import finding, label, main, names

HEADER = {
    "algorithm": "marsit",
    "algorithm_options": {"full_precision_every": 100, "clip": 2.0},
    "dataset": "digits",
    "model": "mlp",
    "ranks": 4,
    "optimizer": "momentum",
    "lr": 0.03,
}


def line(epoch: int = 1, **changes: Any) -> str:
    record = {
        "kind": "epoch",
        **HEADER,
        "epoch": epoch,
        "accuracy": 1 - 0.5**epoch,
        "bytes_so_far_per_rank": 1e6 * epoch,
        "seconds_so_far": float(epoch),
    }
    return json.dumps(record | changes) + "\n"


def write_run(path: Path, n_epochs: int, **changes: Any) -> Path:
    lines = [line(epoch, **changes) for epoch in range(1, n_epochs + 1)]
    path.write_text("".join([*lines, line(n_epochs + 1, kind="diverged")]))
    return path


def test_a_label_says_what_is_not_the_default() -> None:
    assert label(HEADER) == "marsit-100 clip=2.0"
    assert label({**HEADER, "algorithm_options": {"full_precision_every": None}}) == "marsit"


def test_names_say_what_differs_between_the_runs() -> None:
    adam = {**HEADER, "optimizer": "adam", "lr": 0.001}
    assert names([HEADER, HEADER]) == ["marsit-100 clip=2.0"] * 2
    assert names([HEADER, adam]) == ["marsit-100 clip=2.0, momentum 0.03", "marsit-100 clip=2.0, adam 0.001"]
    assert names([HEADER, {**HEADER, "ranks": 8}])[1] == "marsit-100 clip=2.0, 8 ranks"


@pytest.mark.parametrize(
    ("marsit", "title"),
    [
        ((0.875, 1e6), "marsit-100 sends 24 times fewer bytes than dense and ends 0.5 points below its accuracy"),
        ((0.89, 1e6), "marsit-100 sends 24 times fewer bytes than dense and ends 1.0 points above its accuracy"),
        ((0.8801, 1e6), "marsit-100 sends 24 times fewer bytes than dense and ends at its accuracy"),
        ((0.89, 48e6), "marsit-100 ends with 89.0 % of test accuracy"),
    ],
)
def test_the_title_is_the_finding(marsit: tuple[float, float], title: str) -> None:
    ends = {"dense": (0.88, 24e6), "marsit-100": marsit}
    runs = {
        name: [{"accuracy": 0.1, "bytes_so_far_per_rank": 1.0}, {"accuracy": end, "bytes_so_far_per_rank": sent}]
        for name, (end, sent) in ends.items()
    }
    assert finding(runs) == title
    assert finding({"dense": []}) == "No run finished an epoch"


def test_the_note_is_of_all_runs_and_the_stretched_axis_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr("apps.train.plot.save", lambda figure, path: figures.append(figure))
    runs = [write_run(tmp_path / "a.json", 3), write_run(tmp_path / "b.json", 3, ranks=8, optimizer="adam", lr=0.001)]
    assert main([*map(str, runs), "--out", str(tmp_path / "plot.png")]) == 0
    (figure,) = figures
    note = figure.get_supxlabel().replace("\N{NO-BREAK SPACE}", " ")
    assert note == "digits, mlp, 4 and 8 ranks, momentum 0.03 and adam 0.001"
    assert figure.get_supylabel() == "test accuracy, % (scale stretched towards 100 %)"
    assert "ends with 87.5" in figure.get_suptitle().replace("\n", " ")
    plt.close(figure)


@pytest.mark.parametrize("changes", [{}, {"bytes_so_far_per_rank": 0.0}])
def test_draws_runs_that_end_in_divergence_or_send_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    runs = [write_run(tmp_path / "a.json", 3, **changes), write_run(tmp_path / "b.json", 0)]
    out = tmp_path / "plot.png"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_what_a_run_tells_before_its_epochs_is_passed_over(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.json", 3)
    path.write_text(json.dumps({"kind": "links", "links": []}) + "\n" + path.read_text())
    assert main([str(path), "--out", str(tmp_path / "plot.png")]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "line 1 is no line of a training run"),
        (b"\x89PNG", "line 1 is no line of a training run"),
        ("", "no training run"),
        ("[1]\n", "not an object"),
        ('{"kind": "links"}\n', "no epoch of a training run"),
        ('{"kind": "epoch", "epoch": 1}\n', "it has no 'accuracy'"),
        (line(accuracy="high"), "its 'accuracy' is 'high', not a number"),
        (line(bytes_so_far_per_rank=10**400), "more than 40 digits"),
        (line(algorithm_options=[]), r"its 'algorithm_options' is [], not an object"),
        (line(kind="links", lr=None), "its 'lr' is None, not a number"),
        ("[" * 100_000 + "\n", "nested deeper than"),
    ],
)
def test_rejects_other_files_in_one_line(
    tmp_path: Path, content: str | bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main([str(path), "--out", str(tmp_path / "plot.png")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error
    assert len(error.splitlines()) == 1
    assert main([str(tmp_path / "missing.json")]) == 1
