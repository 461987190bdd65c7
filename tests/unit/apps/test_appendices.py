"""Appendices of the documentation: ``python -m apps.appendices`` makes their tables of records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from apps import appendices
from apps.appendices import PAGES, generate, parse, publish, record_of, render, to_json
from tests.documents import tables

BODY = "**four**\n\n| size | ring, ms |\n| --- | ---: |\n| 4kB | 0.89 |\n| 1MB |  |\n\n<sub>One machine, “idle”.</sub>"
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def places(page: Path) -> list[str]:
    return re.findall(r"^<!-- begin (\S+) -->$", page.read_text(), re.MULTILINE)


@pages
def test_an_appendix_is_made_of_its_records(page: Path) -> None:
    assert generate(page) == page.read_text()


@pages
def test_every_place_of_an_appendix_has_a_record(page: Path) -> None:
    assert [name for name in places(page) if not record_of(page, name).is_file()] == []


def test_a_table_that_is_published_replaces_its_place_and_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin sizes -->\nold\n<!-- end sizes -->\nafter\n")
    monkeypatch.setattr(appendices, "PAGES", (page,))
    publish(page, "sizes", BODY)
    assert BODY in page.read_text()
    assert render(json.loads(record_of(page, "sizes").read_text())) == BODY
    edited = page.read_text().replace("0.89", "0.88")
    page.write_text(edited)
    assert BODY in generate(page)
    assert appendices.main(["--take"]) == 0
    assert appendices.main([]) == 0
    assert page.read_text() == edited


def test_a_table_of_another_page_has_no_record(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- begin sizes -->\n<!-- end sizes -->\n")
    publish(page, "sizes", BODY)
    assert [*tmp_path.iterdir()] == [page]


def test_a_table_is_read_as_it_is_written() -> None:
    content = parse(BODY)
    assert content[1] == {
        "columns": ["size", "ring, ms"], "alignment": ["left", "right"], "rows": [["4kB", "0.89"], ["1MB", ""]]
    }  # fmt: skip
    assert render(content) == BODY
    assert json.loads(to_json(content)) == content


def test_claims_are_counted_as_the_records_judge_them() -> None:
    (page,) = (page for page in PAGES if page.stem == "reproduce")
    summary = {row[0].strip("`"): row[2] for row in tables(page)["paper"] if row[0].startswith("`")}
    for name in places(page):
        (table,) = json.loads(record_of(page, name).read_text())
        verdicts = [row[table["columns"].index("reproduced")] for row in table["rows"]]
        judged = [verdict for verdict in verdicts if verdict != "–"]
        assert summary[name] == f"{judged.count('yes')} of {len(judged)}", name
