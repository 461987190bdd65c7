"""Pages of the manual in a terminal."""

from __future__ import annotations

import pydoc
import re
from pathlib import Path

import pytest

import mpicomp
from mpicomp import manual
from mpicomp.algorithms import ALGORITHMS
from mpicomp.cli.main import main
from mpicomp.manual import page_text
from tests.documents import PROJECT


def test_a_topic_is_the_name_of_a_page_s_file() -> None:
    assert {*manual.topics()} == {page.stem for page in (PROJECT / "docs").glob("*.md")}


def test_the_command_and_the_function_print_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "faults"]) == 0
    page = capsys.readouterr().out
    mpicomp.help_page("faults")
    mpicomp.help_page("docs/faults.md")  # as a page's own links name it
    assert capsys.readouterr().out == page * 2
    assert page.startswith("# Ranks that die")
    assert "](" not in re.sub(r"(?ms)^```.*?^```$|`[^`]*`", "", page)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_method_s_name_prints_the_page_that_describes_it(method: str) -> None:
    assert ALGORITHMS[method].__name__ in page_text(method)


def test_without_a_topic_all_pages_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"^  quickstart +Quickstart", "\n".join(lines), re.MULTILINE)
    assert len(lines) == len(manual.topics()) + 1
    assert max(map(len, lines)) <= 120


def test_a_misspelt_topic_ends_in_one_line_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "fautls"]) == 2
    told = "mpicomp help: error: there is no page 'fautls' (did you mean 'faults'?): mpicomp help lists all pages\n"
    assert capsys.readouterr().err == told
    with pytest.raises(ValueError, match="there is no page 3: mpicomp help"):
        mpicomp.help_page(3)  # type: ignore[arg-type]


def test_a_wheel_has_its_pages_next_to_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.md").write_text(
        "# Other\n\n<div></div>\n![Bars](x.png) [this](other.md#a), [web](https://w.x)\n"
    )
    monkeypatch.setattr(manual, "_FOLDERS", (tmp_path, *manual._FOLDERS))
    assert manual.page_text("other") == "# Other\n\nBars this [other], web <https://w.x>\n"


def test_topics_that_the_library_names_exist() -> None:
    named = {
        topic
        for package in ("collectives", "mpicomp")
        for path in (PROJECT / package).rglob("*.py")
        for topic in re.findall(r"`mpicomp help ([a-z-]+)`|\bmpicomp help ([a-z-]+)[,;]", path.read_text())
        for topic in topic
        if topic
    }
    assert len(named) > 5
    assert named <= {*manual.topics()}


def test_what_a_wheel_carries_names_topics_and_no_files_that_it_lacks() -> None:
    files = [path for folder in ("collectives", "mpicomp", "batch") for path in (PROJECT / folder).rglob("*.*")]
    carried = (path for path in (*files, PROJECT / "slurm/run.sbatch") if path.suffix not in (".pyc", ".nbc", ".nbi"))
    assert [path for path in carried if re.search(rb"\bdocs/[a-z-]+\.md\b", path.read_bytes())] == []


def test_help_of_the_package_is_a_screen_and_not_a_book() -> None:
    text = pydoc.plain(pydoc.render_doc(mpicomp))
    assert text.count("\n") < 60
    assert "mpicomp.run_local(2, average)" in text
    assert "class Marsit" in pydoc.plain(pydoc.render_doc(mpicomp.Marsit))
    assert {*mpicomp.__all__} < {*dir(mpicomp)}
