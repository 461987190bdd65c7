"""The documentation's figures: each is drawn by one command from kept data, is shown by a page, and has a text."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apps.figure_style import WIDTH_INCHES
from apps.figures import DATA, DRAWN, FIGURES, main
from tests.documents import DOCUMENTS, PROJECT

MOST_BYTES = 120_000
LEAST_TEXT = 35
"""Characters of a text that says what a figure shows."""
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def pictures() -> list[tuple[Path, str, Path]]:
    """Page, text and file of each figure that a page shows."""
    found = [
        (page, match[1], (page.parent / match[2]).resolve())
        for page in DOCUMENTS
        for match in PICTURE.finditer(page.read_text())
    ]
    return [one for one in found if one[2].parent == FIGURES]


def test_every_figure_is_shown_by_a_page_and_every_picture_of_a_page_is_there() -> None:
    assert {path for _, _, path in pictures()} == set(FIGURES.glob("*.png"))


def test_every_figure_has_a_text_that_says_what_it_shows() -> None:
    assert [(page.name, text) for page, text, _ in pictures() if len(text) < LEAST_TEXT] == []


def test_figures_are_small_opaque_and_of_one_width() -> None:
    for path in FIGURES.glob("*.png"):
        assert path.stat().st_size <= MOST_BYTES, path.name
        with Image.open(path) as image:
            assert "transparency" not in image.info, path.name
            assert image.mode in ("P", "RGB"), path.name
            assert image.width == round(WIDTH_INCHES * 200), path.name


def test_one_command_draws_every_figure_and_each_data_file_names_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.stem for path in DATA.glob("*.json")} | {"frontier"} == set(DRAWN)
    before = {path: path.read_bytes() for path in DATA.glob("*.json")}
    assert main(["--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in FIGURES.glob("*.png")}
    assert capsys.readouterr().out.count("wrote ") == len(list(FIGURES.glob("*.png")))
    assert {path: path.read_bytes() for path in DATA.glob("*.json")} == before
    for path in DATA.glob("*.json"):
        found = json.loads(path.read_text())
        assert found.get("source") or path.stem == "scale", path.name  # simulations are their own source


def test_names_of_data_files_choose_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fine-tuning", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["fine-tuning.png"]
    with pytest.raises(SystemExit, match="2"):
        main(["cluter"])
    assert "'cluter' is none of aq-sgd, cluster" in capsys.readouterr().err


def test_data_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("apps.figures.DATA", tmp_path)
    (tmp_path / "split-learning.json").write_text('{"source": "nothing"}')
    assert main(["split-learning", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "split-learning.json" in error
    assert len(error.splitlines()) == 1


def test_the_figures_of_aq_sgd_have_the_tables_numbers() -> None:
    table = (PROJECT / "docs" / "reproduce.md").read_text()
    found = json.loads((DATA / "aq-sgd.json").read_text())
    for row in found["gaps"]:
        for name in ("AQ-SGD", "DirectQ"):
            printed = [row[name]] if isinstance(row[name], str) else row[name]
            assert all(text in table for text in printed), row["name"]
    times = found["seconds"]["to_loss_s"]
    assert f"fp32 {times['float32']} s" in table
    assert f"AQ-SGD fw2 bw4 {times['AQ-SGD']} s" in table


def test_the_figure_of_fine_tuning_has_the_table_s_numbers() -> None:
    page = (PROJECT / "docs" / "fine-tuning.md").read_text()
    for row in json.loads((DATA / "fine-tuning.json").read_text())["methods"]:
        (line,) = re.findall(rf"^\| {row['name']} \| [\d.]+ \|.*$", page, re.MULTILINE)
        assert f"{row['accuracy']:.2f} ± {row['error']:.2f}" in line
        assert line.endswith(f"{row['bits_per_element']:.2f} |")


def test_the_titles_of_aq_sgd_have_the_numbers_of_the_data() -> None:
    pictures = import_module("apps.reproduce.aq_sgd.pictures")
    found = json.loads((DATA / "aq-sgd.json").read_text())
    assert pictures.gaps_title(found["gaps"]) == (
        "Fine-tuning by AQ-SGD ends at most 0.01 nats above float32, by DirectQ up to 0.46; "
        "from random weights 0.12 and 0.26"
    )
    times = found["seconds"]["to_loss_s"]
    expected = f"AQ-SGD reaches float32's loss {times['float32'] / times['AQ-SGD']:.2f} times as fast at 100 Mbit/s"
    assert pictures.seconds_title(times) == f"{expected}; DirectQ does not reach it"
    assert pictures.seconds_title(times | {"DirectQ": 9.0}) == expected
    assert pictures.printed(["2.5", "2"]) == (0.5, 0)
    assert pictures.printed("-0.1 ± 0.02") == (-0.1, 0.02)


def test_changes_of_activations_are_parts_of_their_size() -> None:
    pictures = import_module("apps.reproduce.aq_sgd.pictures")
    sizes = np.full((2, 40), 2.0)
    changes = np.concatenate([np.full((2, 10), np.nan), np.full((2, 15), 0.5), np.full((2, 15), 0.1)], axis=1)
    assert pictures.parts_that_change(sizes, changes) == pytest.approx((0.25, 0.05))


def test_the_titles_of_sparse_loco_and_split_learning_have_the_numbers_of_the_data() -> None:
    runs = json.loads((DATA / "sparse-loco.json").read_text())["runs"]
    sent, ends = (
        {name: np.mean([pick(record) for record in records]) for name, records in runs.items()}
        for pick in (lambda record: record["bytes"], lambda record: record["losses"][-1])
    )
    assert import_module("apps.reproduce.sparse_loco").finding(runs) == (
        f"SparseLoCo sends {sent['local steps'] / sent['SparseLoCo']:.0f} times fewer bytes than averaging local steps "
        f"in full and ends {ends['SparseLoCo'] - ends['local steps']:.2f} nats above it"
    )

    plot = import_module("apps.pipeline.split.plot")
    split = json.loads((DATA / "split-learning.json").read_text())["runs"]
    assert (
        plot.finding(split)
        == "AQ-SGD in 2 bits ends with 83.3 % accuracy, float32 with 83.5 %, and sends 12 times fewer bytes"
    )
    last = {plot.called(run): run["rounds"][-1] for run in split}
    assert last["AQ-SGD, 2 bits"]["test_accuracy"] == 0.833
    assert last["float32"]["test_accuracy"] == 0.835
    assert plot.finding(split[:1]) == "Test accuracy after the last round: float32 83.5 %"
