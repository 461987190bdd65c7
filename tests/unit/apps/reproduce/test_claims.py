"""Differences and claims are judged, and shown in a table."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from apps import appendices
from apps.reproduce import __main__ as program
from apps.reproduce import marsit
from apps.reproduce.claims import Claim, paired, table, time_to_goal
from apps.studies.results import Results


def test_a_difference_is_sure_only_if_its_interval_leaves_out_zero() -> None:
    sure = paired([1.0, 1.1, 0.9, 1.0], [2.0, 2.0, 2.0, 2.0])
    assert sure.mean == pytest.approx(-1)
    assert sure.half_width == pytest.approx(3.182 * np.std([1.0, 1.1, 0.9, 1.0], ddof=1) / 2, rel=1e-3)
    assert sure.below
    assert not sure.above
    unsure = paired([1.0, 3.0], [2.0, 2.0])
    assert not unsure.below
    assert not unsure.above
    with pytest.raises(ValueError, match="2 at least, not 1 and 1"):
        paired([1.0], [2.0])


def test_the_end_of_a_run_is_no_time_to_the_goal() -> None:
    assert time_to_goal([1.0, 2.0], 0) == "1.5 s"
    assert time_to_goal([1.0, 2.0], 2) == "not within 1.5 s"
    assert time_to_goal([1.0, 2.0], 1) == "1 of 2 seeds not within the run"


def test_a_table_says_what_was_not_found_again() -> None:
    claims = [Claim("Fig. 1", "a", "1", "2", holds, "less") for holds in (True, False, None)]
    lines = table(claims).splitlines()[2:]
    assert ["| yes |" in lines[0], "| **no** |" in lines[1], "| – |" in lines[2]] == [True] * 3


def test_a_table_is_published_on_demand_and_never_after_a_quick_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "reproduce.md"
    page.write_text("<!-- begin marsit -->\n<!-- end marsit -->\n")
    claims = [Claim("Fig. 1", "a", "1", "2", True, "less")]
    study = SimpleNamespace(PARTS=[lambda results, seeds, full: (claims, [])])
    monkeypatch.setattr(program, "import_module", lambda name: study)
    monkeypatch.setattr(program, "DOCUMENT", page)
    monkeypatch.setattr(appendices, "PAGES", (page,))
    command = ["marsit", "--folder", str(tmp_path / "runs")]
    assert program.main(command) == 0
    assert "Fig. 1" not in page.read_text()
    assert program.main([*command, "--publish"]) == 0
    assert "| Fig. 1 | a | 1 | 2 | yes | less |" in page.read_text()
    assert appendices.record_of(page, "marsit").exists()
    with pytest.raises(SystemExit):
        program.main([*command, "--publish", "--quick"])


def test_parts_of_a_study_can_be_chosen_by_words_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = []

    def table_1(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
        called.append("table-1")
        return [Claim("Table 1", "cascading fails", "1", "2", True, "less")], []

    def figure_3(results: Results, seeds: int, full: bool, quick: bool) -> tuple[list[Claim], list[Path]]:
        called.append("figure-3")
        return [], []

    monkeypatch.setattr(marsit, "PARTS", (table_1, partial(figure_3, quick=True)))
    assert program.main(["marsit", "--folder", str(tmp_path), "--only", "table"]) == 0
    assert called == ["table-1"]
    assert not list(tmp_path.rglob("table.md"))  # which is that of the whole study
    assert program.main(["marsit", "--folder", str(tmp_path)]) == 0
    assert called == ["table-1", "table-1", "figure-3"]
    assert len(list(tmp_path.rglob("table.md"))) == 1
    with pytest.raises(SystemExit):
        program.main(["marsit", "--only", "tabel"])
    with pytest.raises(SystemExit):
        program.main(["marsit", "--only", "table", "--publish"])
    assert "--only tabel: the parts are table-1, figure-3" in capsys.readouterr().err
