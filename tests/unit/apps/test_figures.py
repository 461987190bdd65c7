"""The documentation's figures: each is drawn by one command from kept data, is shown by a page, and has a text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from apps.figures import DATA, DRAWN, FIGURES, main
from mpicomp.cli.figure_style import WIDTH_INCHES
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
    assert {path.stem for path in DATA.glob("*.json")} == set(DRAWN)
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
