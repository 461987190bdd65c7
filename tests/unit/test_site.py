"""The site of the documentation: its navigation has every page, and its reference every public name."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from mpicomp import Communicator
from tests.documents import DOCUMENTS, PROJECT, blocks, links, prose
from tests.system import check_redirects
from tests.system.check_search import QUESTIONS, Search, main

REFERENCE = tomllib.loads((PROJECT / "docs" / "site" / "reference.toml").read_text())
PACKAGES, MEMBERS = REFERENCE.pop("packages"), REFERENCE.pop("members")
NAMES = [f"{module}.{name}" for page in REFERENCE.values() for module, names in page["names"].items() for name in names]
GENERATED = {"index.md", "contributing.md", "changelog.md", "reference.md", *(f"{page}.md" for page in REFERENCE)}
MOST_PAGES, MOST_WORDS = 60, 90_000
"""Of the manual: every page outside of the tab Project and of the reference that the site generates."""
ANSWERS = (
    *("clusters", "run", "slurm", "choose", "why-slow", "worse-loss", "fine-tuning", "notebooks", "faq"),
    *("gpu", "local", "examples", "migrating"),
    *{answer for answers in QUESTIONS.values() for answer in answers},
)
INDEX = {
    "config": {
        "separator": r"[\s.()]+",
        "fields": {"title": {"boost": 1000}, "text": {"boost": 1}, "tags": {"boost": 1}},
    },
    "docs": [
        {"location": "gpu-nodes.html", "title": "GPU tensors", "text": "<p>of the (nodes)</p>"},
        {"location": "faq.html", "title": "Questions", "text": "Hosts without GPUs."},
        {"location": "faq.html#gpus", "title": "GPUs", "text": "<code>torch.compile</code>"},
        {"location": "records.html", "title": "GPU tensors", "text": "of the nodes", "boost": 0.1},
    ],
}
EXAMPLES = {
    (statement.module, name.name)
    for document in DOCUMENTS
    for block in blocks(document, "python")
    for statement in ast.walk(ast.parse(block))
    if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.split(".")[0] != "tests"
    for name in statement.names
}


def resolve(path: str) -> Any:
    """Return the object of a path: a module's, or a name's in one."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def objects() -> list[Any]:
    """Return the objects that have an entry, without those of packages that are not installed here."""
    found = []
    for name in NAMES:
        with suppress(ImportError):
            found.append(resolve(name))
    return found


def is_entry(path: str, entries: list[Any]) -> bool:
    """Return True for a module, and for an object that is an entry under another path."""
    with suppress(ImportError):
        value = resolve(path)
        return isinstance(value, ModuleType) or any(value is entry for entry in entries)
    return False


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"^ *- (?:[\w ]+: )?([\w-]+\.md)$", (PROJECT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(GENERATED | {path.name for path in (PROJECT / "docs").glob("*.md")})


def test_the_manual_is_short_enough_to_be_read() -> None:
    nav = (PROJECT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n- Project:\n")[0]
    names = set(re.findall(r"([\w-]+\.md)$", nav, re.MULTILINE)) - GENERATED
    words = sum(len((PROJECT / "docs" / name).read_text().split()) for name in names)
    assert len(names) <= MOST_PAGES - 1  # and README, the start page
    assert words <= MOST_WORDS


def test_questions_of_a_new_user_are_answered_two_clicks_from_the_start_page() -> None:
    once = {link.partition("#")[0].removeprefix("docs/") for link in links(PROJECT / "README.md")}
    pages = [PROJECT / "docs" / name for name in once if (PROJECT / "docs" / name).suffix == ".md"]
    twice = once.union(*({link.partition("#")[0] for link in links(page)} for page in pages if page.exists()))
    assert {f"{name}.md" for name in ANSWERS} <= twice


def test_pages_that_answer_a_question_exist() -> None:
    answers = {answer for answers in QUESTIONS.values() for answer in answers}
    assert [name for name in sorted(answers) if not (PROJECT / "docs" / f"{name}.md").is_file()] == []


def test_the_search_prefers_titles_and_whole_pages_and_lists_records_last() -> None:
    search = Search(INDEX)
    assert search.pages("gpu node") == ["gpu-nodes.html", "faq.html", "records.html"]
    assert search.pages("compile") == ["faq.html"]  # between a dot and a tag
    assert search.pages("ode") == search.pages("the") == []  # no beginning of a word; a word that is not indexed


def test_a_question_that_no_page_answers_fails_and_names_the_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(INDEX))
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "search: 'LoRA': expected fine-tuning, found nothing" in lines
    assert not [line for line in lines if "'GPU nodes'" in line]


def test_pages_that_have_gone_lead_to_others() -> None:
    git = ["git", "log", "--format=", "--name-only", "--no-renames", "--diff-filter=D", "--", "docs/*.md"]
    history = subprocess.run(git, cwd=PROJECT, capture_output=True, text=True, check=False).stdout.split()
    gone = {Path(name).stem for name in history if Path(name).parent.name == "docs" and not (PROJECT / name).exists()}
    redirects = tomllib.loads((PROJECT / "docs" / "site" / "redirects.toml").read_text())
    assert gone <= redirects.keys()
    for old, new in redirects.items():
        assert not (PROJECT / "docs" / f"{old}.md").exists()
        assert (PROJECT / "docs" / f"{new.partition('#')[0]}.md").is_file(), new


def test_an_address_that_leads_nowhere_fails_with_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_redirects, "REDIRECTS", tmp_path / "redirects.toml")
    (tmp_path / "redirects.toml").write_text('old = "new#part"\nolder = "gone"\noldest = "new"\nlost = "new"\n')
    (tmp_path / "new.html").write_text('<h2 id="part">')
    for page, target in (("old", "new.html#part"), ("older", "gone.html"), ("oldest", "new.html#other")):
        (tmp_path / f"{page}.html").write_text(f'<meta http-equiv="refresh" content="0; url={target}">')
    assert check_redirects.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "redirects: older.html: leads to gone.html",
        "redirects: oldest.html: new.html has no heading #other",
        "redirects: lost.html: no page of the site",
    ]


def test_the_reference_lists_a_name_once() -> None:
    assert sorted(NAMES) == sorted(set(NAMES))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_its_entry_in_the_reference(package: str) -> None:
    module = import_module(package)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == package]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    entries = objects()
    assert names
    assert [name for name in names if not any(getattr(module, name) is entry for entry in entries)] == []


def test_every_name_that_an_example_imports_has_its_entry_in_the_reference() -> None:
    ours = [(module, name) for module, name in EXAMPLES if module.split(".")[0] in ("mpicomp", "collectives")]
    others = {f"{module}.{name}" for module, name in ours} - {*NAMES}
    entries = objects()
    assert [path for path in sorted(others) if not is_entry(path, entries)] == []


def test_links_to_other_sites_are_complete_and_encrypted() -> None:
    for document in DOCUMENTS:
        text = prose(document)
        assert "http://" not in text, document.name
        for link in (link for link in links(document) if ":" in link):
            url = urlsplit(link)
            assert url.scheme == "https", link
            assert re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", url.netloc), link


def test_methods_that_complete_at_the_prompt_are_in_the_reference(comm: Communicator) -> None:
    methods = {name for name in dir(comm) if callable(getattr(Communicator, name, None))}
    assert methods - {*MEMBERS["mpicomp.Communicator"]} == set()


def test_members_in_the_reference_exist() -> None:
    for path, members in MEMBERS.items():
        with suppress(ImportError):  # of a package that is not installed here
            assert [name for name in members if not hasattr(resolve(path), name)] == []
