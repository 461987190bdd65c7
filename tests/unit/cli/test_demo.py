"""``mpicomp demo``: it prints and draws measured figures of comparable trainings, and refuses bad arguments."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives.cost.rate import EmulatedLink
from mpicomp import Dense, Marsit, run_local
from mpicomp.cli.demo import model, picture, program, text
from mpicomp.cli.demo.display import Trainings
from mpicomp.cli.demo.report import Comparison, next_steps
from mpicomp.cli.demo.training import BATCH, Point, train
from mpicomp.cli.main import COMMANDS, main
from mpicomp.manual import page_text
from tests.documents import PROJECT

WIRE = 1 + 66 / 1448  # headers of TCP for each byte
FAST = "2gbit"  # 4 ranks share the cores, and messages their memory


def ended(*accuracies: float, seconds: float = 1.0, waiting: float = 0.5, sent: float = 1e6) -> list[Point]:
    """Return points of a training with these accuracies, and the rest of the figures at its end."""
    parts = np.linspace(0, 1, len(accuracies))
    return [
        Point(6 * place, accuracy, seconds * part, waiting * part, sent * part)
        for place, (accuracy, part) in enumerate(zip(accuracies, parts, strict=True))
    ]


DENSE = ended(0.01, 0.4, 0.5, seconds=31.5, waiting=30.1, sent=366e6)
MARSIT = ended(0.01, 0.39, 0.46, 0.51, seconds=2.5, waiting=1.25, sent=13.7e6)
FOUND = Comparison(DENSE, MARSIT, 4, True, "100 Mbit/s")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Comparison]:
    """Collect the comparisons that the command makes."""
    kept: list[Comparison] = []

    def keep(*arguments: Any) -> Comparison:
        kept.append(Comparison(*arguments))
        return kept[-1]

    monkeypatch.setattr(program, "Comparison", keep)
    return kept


@pytest.mark.timeout(240)
def test_the_printed_figures_are_those_of_the_trainings(
    runs: list[Comparison], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "demo.svg"
    assert main(["demo", "--steps", "2", "--ranks", "4", "--link", FAST, "--output", str(path)]) == 0
    out, err = capsys.readouterr()
    (found,) = runs
    dense, marsit = found.dense[-1], found.marsit[-1]
    assert dense.step == 2
    assert 1 <= marsit.step <= 4
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines() if "  " in line}
    for name, point in (("dense", dense), ("Marsit", marsit)):
        assert lines[name][1:] == [
            str(point.step), f"{100 * point.accuracy:.1f}", "%", f"{point.bytes_sent / 1e6:.1f}",
            f"{point.seconds:.1f}", f"{point.seconds_waiting:.1f}",
        ]  # fmt: skip
        assert f"accuracy {100 * point.accuracy:4.1f} %" in err
    assert lines["dense / Marsit"][-1] == f"{dense.seconds / marsit.seconds:.1f}"
    # Each rank sends 2 (M - 1) / M vectors a step, which a link of this rate holds back.
    assert dense.bytes_sent == pytest.approx(2 * 1.5 * 4 * model.N_PARAMETERS, rel=0.01)
    assert marsit.bytes_sent / marsit.step == pytest.approx(dense.bytes_sent / 2 / 32, rel=0.05)
    assert dense.seconds >= dense.bytes_sent * WIRE / (2e9 / 8)
    assert dense.seconds_waiting < dense.seconds
    if "Picture: none" in out:
        assert "pip install rich matplotlib" in out
    else:
        assert f"Picture: {path}" in out
        assert path.read_text().startswith("<?xml")
    assert "4 threads of one process, emulated links of 2 Gbit/s" in out


@pytest.mark.timeout(240)
def test_without_an_mpi_library_threads_train_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpicomp.cli.main", "demo", "--steps", "1", "--link", FAST, "--output", "demo.svg"],
        cwd=tmp_path, env=os.environ | {"MPI4PY_LIBMPI": "/none/libmpi.so", "PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\ndense / Marsit " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("The demo needs no MPI library, but jobs do: no MPI library can be loaded (/none/libmpi.so")


def test_the_picture_has_the_points_and_its_title_the_finding() -> None:
    pytest.importorskip("matplotlib")
    figure = picture.make_figure(FOUND)
    curves, bars = figure.axes
    for line, points in zip(curves.lines, (DENSE, MARSIT), strict=True):
        assert list(line.get_xdata()) == [point.seconds for point in points]
        assert list(line.get_ydata()) == [100 * point.accuracy for point in points]
    assert figure.get_suptitle() == FOUND.finding()
    assert curves.get_title(loc="left") == FOUND.conditions()
    texts = "\n".join(found.get_text() for axes in figure.axes for found in axes.texts)
    assert "dense: 50.0 % after 31.5 s\n366 MB sent by each rank" in texts
    assert "Marsit: 51.0 % after 2.5 s\n14 MB sent by each rank" in texts
    assert "12.6 times as fast" in texts
    assert "1.4 s busy, 30.1 s waiting for messages" in texts
    assert [part.get_width() for part in bars.patches] == pytest.approx([1.4, 30.1, 1.25, 1.25])


def test_a_picture_without_a_gain_shows_none() -> None:
    pytest.importorskip("matplotlib")
    slow = Comparison(ended(0.1, 0.5), ended(0.1, 0.5, seconds=3.0), 4, True, None)
    figure = picture.make_figure(slow)
    assert not any("times as fast" in found.get_text() for axes in figure.axes for found in axes.texts)


@pytest.mark.parametrize(
    ("accuracy", "seconds", "sentence"),
    [
        (0.51, 0.1, "Marsit trains 10.0 times as fast as dense to the same accuracy, over links of 1 Gbit/s"),
        (0.492, 0.1, "Marsit trains 10.0 times as fast as dense to the same accuracy, over links of 1 Gbit/s"),
        (0.48, 0.1, "Marsit ended 2.0 points below the accuracy of dense, over links of 1 Gbit/s"),
        (0.5, 1.02, "Marsit is as fast as dense, over links of 1 Gbit/s"),
        (0.5, 2.0, "Marsit takes 2.0 times as long as dense to the same accuracy, over links of 1 Gbit/s"),
    ],
)
def test_the_finding_states_the_gain(accuracy: float, seconds: float, sentence: str) -> None:
    found = Comparison(ended(0.1, 0.5), ended(0.1, accuracy, seconds=seconds), 4, True, "1 Gbit/s")
    assert found.noise == pytest.approx(1.083, abs=0.001)  # 1.96 sqrt(0.25 / 8192)
    assert found.finding() == sentence
    assert found.conclusion()[0] == f"{sentence}."


def test_a_gain_is_reported_with_its_conditions() -> None:
    whole = " ".join(FOUND.conclusion())
    assert "Accuracy: dense 50.0 % after 12 steps, Marsit 51.0 % after 18 steps; each ± 1.1" in whole
    assert "4 threads of one process, emulated links of 100 Mbit/s, a perceptron of 1.02 million parameters" in whole
    on_mpi = Comparison(DENSE, MARSIT, 4, False, None)
    assert "over this network" in on_mpi.finding()
    assert on_mpi.conditions().startswith("4 ranks of MPI, no emulated link")


@pytest.mark.parametrize(("rate", "other"), [("100mbit", "1gbit"), ("1gbit", "100mbit"), ("10gbit", "100mbit")])
def test_another_link_than_the_demos_is_to_try_next(rate: str, other: str) -> None:
    assert f"mpicomp demo --link {other} " in "\n".join(next_steps(EmulatedLink.parse(rate)))


def test_commands_to_try_next_are_there_without_pytorch() -> None:
    for line in (line for link in (None, EmulatedLink.parse("100mbit")) for line in next_steps(link)[1:]):
        words = line.split()
        assert words[0] == "mpicomp", line
        for at in (at for at, word in enumerate(words) if word == "mpicomp"):
            assert words[at + 1] in COMMANDS
        assert words[1] != "help" or page_text(words[2])


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    random, w = np.random.default_rng(1), model.initial_parameters(0)
    contexts, following = text.read_text().batch(random, 32)
    found = np.empty_like(w)
    model.gradient(w, contexts, following, found)

    def loss(vector: model.Floats) -> float:
        scores = model._forward(vector, contexts)[-1].astype(np.float64)
        normal = np.log(np.exp(scores).sum(axis=1))
        return float((normal - scores[np.arange(len(following)), following]).mean())

    for start, end in ((0, 1000), (len(w) - 3000, len(w)), (0, len(w))):  # both layers, and all parameters
        direction = np.zeros_like(w)
        direction[start:end] = found[start:end] / np.linalg.norm(found[start:end])
        slope = (loss(w + 2e-3 * direction) - loss(w - 2e-3 * direction)) / 4e-3
        assert slope == pytest.approx(float(found @ direction), rel=0.02)


def test_adam_is_adam() -> None:
    random, adam = np.random.default_rng(2), model.Adam()
    first = second = np.zeros(model.N_PARAMETERS)
    for step in range(1, 4):
        gradient = random.standard_normal(model.N_PARAMETERS, np.float32)
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient.astype(np.float64) ** 2
        wanted = model.RATE * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-12)
        np.testing.assert_allclose(adam.update(gradient), wanted, rtol=5e-3, atol=1e-5)


def test_both_methods_see_the_same_batches_and_all_ranks_the_same_points() -> None:
    words, seen = text.read_text(), []

    class Watched(text.Text):
        def batch(self, random: np.random.Generator, size: int) -> tuple[Any, Any]:
            found = super().batch(random, size)
            seen.append(found[0].tobytes())
            return found

    def points(method: Any) -> list[list[Point]]:
        watched = Watched(words.trained, words.tested)
        return run_local(2, lambda comm: train(comm, method, watched, steps=2, test_every=1, seed=3), "ring")

    dense = points(Dense())
    drawn, seen[:] = set(seen), []
    marsit = points(Marsit(full_precision_every=None))
    assert drawn == set(seen)
    assert len(drawn) == 4  # of 2 ranks and 2 steps
    assert dense[0] == dense[1]
    assert [point.step for point in marsit[0]] == [0, 1, 2]
    assert dense[0][0].accuracy == marsit[0][0].accuracy  # of the same weights


def test_a_training_ends_at_the_accuracy_that_it_is_to_reach() -> None:
    words = text.read_text()
    reports: list[tuple[int, Point | None]] = []

    def on_rank(comm: Any) -> list[Point]:
        report = (lambda *found: reports.append(found)) if comm.rank == 0 else None
        return train(comm, Dense(), words, steps=50, test_every=2, seed=0, until=0.1, report=report)

    points = run_local(2, on_rank, "ring")[0]
    assert points[-2].accuracy < 0.1 <= points[-1].accuracy
    assert points[-1].step < 50
    assert [step for step, _ in reports] == list(range(points[-1].step + 1))
    assert [point for _, point in reports if point] == points


def test_each_place_of_the_text_is_tested_by_one_rank() -> None:
    words = text.read_text()
    shares = [words.tests(rank, 3)[0] for rank in range(3)]
    assert sum(map(len, shares)) == text.N_TESTED
    assert words.tests(0, 1)[0].shape == (text.N_TESTED, model.CONTEXT)
    assert len(words.trained) + len(words.tested) <= text.LENGTH
    assert max(words.trained.max(), words.tested.max()) < model.SYMBOLS
    contexts, following = words.batch(np.random.default_rng(0), BATCH)
    assert contexts.shape == (BATCH, model.CONTEXT)
    assert following.shape == (BATCH,)


def test_a_packed_standard_library_is_explained(tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text("pass\n")
    with pytest.raises(ValueError, match="has 5 bytes of Python source, and 200000 are needed: use a Python whose"):
        text.read_text(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--link", "fast"), "--link 'fast' is no link: write a rate, such as 100mbit"),
        (("--link", "900gbit"), "--link: 900 Gbit/s is faster than messages are copied here"),
        (("--ranks", "1"), "--ranks 1: give a whole number from 2 to 16"),
        (("--ranks", "99"), "--ranks 99: give a whole number from 2 to 16"),
        (("--steps", "0"), "--steps 0: give a whole number from 1 to 100000"),
        (("--seed", "-1"), "--seed -1: give a whole number of at least 0"),
        (("--output", "demo.txt"), "--output demo.txt: name a file that ends with .png, .svg or .pdf"),
        (
            ("--output", "/proc/none/demo.png"),
            "--output /proc/none/demo.png: there is no folder /proc/none; make it first",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_in_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"mpicomp demo: error: {message}")
    assert err.count("\n") == 1


def test_under_mpirun_its_ranks_train() -> None:
    arguments = {"link": "none", "steps": "1", "seed": "0", "output": "demo.png"}
    with pytest.raises(ValueError, match="--ranks 4: mpirun has started 8 ranks, which train: leave it out"):
        program.DemoRequest.parse(program.argparse.Namespace(ranks="4", **arguments), 8)
    assert program.DemoRequest.parse(program.argparse.Namespace(ranks=None, **arguments), 8).threads == 0
    assert program.DemoRequest.parse(program.argparse.Namespace(ranks=None, **arguments), 1).threads == 4


def test_an_existing_picture_stays_until_it_is_drawn_again(tmp_path: Path) -> None:
    path = tmp_path / "old.png"
    path.write_bytes(b"")
    assert picture.output_problem(path) == picture.output_problem(tmp_path / "new.png") == ""
    assert [found.name for found in tmp_path.iterdir()] == ["old.png"]


def test_ctrl_c_ends_the_demo_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "conduct", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "mpicomp demo: stopped\n"


def test_without_a_terminal_each_test_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for active in (True, False):
        with Trainings(active) as shown:
            shown.begin("dense", 60)
            shown.report(6, DENSE[1])
            shown.report(7, None)
            shown.end(7)
    out, err = capsys.readouterr()
    assert not out
    assert err == (
        "mpicomp demo: dense, step   6 of at most 60:  15.8 s  183.0 MB sent by each rank  accuracy 40.0 %\n"
    )


def test_on_a_terminal_a_bar_of_each_training_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr("mpicomp.cli.demo.display.on_terminal", lambda: True)
    with Trainings(True) as shown:
        for name in ("dense", "Marsit"):
            shown.begin(name, 60)
            shown.report(6, DENSE[1])
            shown.end(7)
    out, err = capsys.readouterr()
    assert not err
    last = out[out.rindex("dense") :]
    assert last.count("7/7") == 2
    assert "accuracy 40.0 %" in last


def test_a_picture_for_which_there_is_no_room_leaves_the_rest_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def draw(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(picture, "draw", draw)
    monkeypatch.setattr(program, "_train", lambda *arguments: DENSE if arguments[3] == "dense" else MARSIT)
    monkeypatch.setattr(program, "_compile", lambda *_: None)
    assert main(["demo", "--output", str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out
    assert "a.png: No space left on device); make room there, or name another file (--output)\n" in out


def test_without_matplotlib_the_cure_takes_the_place_of_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(program, "_train", lambda *arguments: DENSE if arguments[3] == "dense" else MARSIT)
    monkeypatch.setattr(program, "_compile", lambda *_: None)
    assert main(["demo", "--output", str(tmp_path / "a.png")]) == 0
    assert "Picture: none, since Matplotlib is missing: pip install rich matplotlib\n" in capsys.readouterr().out
