"""Hooks of MkDocs: pages from files outside ``docs``, the reference, links, and addresses of pages that have moved.

README is the start page. Other files that a page links to are copied, as text, so that no link leaves the site.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parents[2]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
OUT_OF_SEARCH = ("performance-tables.md", "reproduce.md", "changelog.md")
"""Appendices, whose thousands of figures would hide the pages that explain them."""
BOOSTS = {"Project": 0.1, "Python": 0.5}
"""Weights in the search of records and reports, and of the Python reference, next to 1 of the manual's pages."""
Page = dict[str, Any]
"""Table of `reference.toml`."""
BUTTONS = {"Try it": "docs/examples.md", "Choose a method": "docs/choose.md", "Run on a cluster": "docs/clusters.md"}
"""First steps, which the start page offers below README's first sentence."""
MOVED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title><meta name="robots" content="noindex">
<link rel="canonical" href="{0}"><meta http-equiv="refresh" content="0; url={0}"></head>
<body><p>This page has moved: <a href="{0}">{0}</a></p></body></html>
"""
_LINK = re.compile(r"(\]\(|(?:src|href)=\")(?!https?:|mailto:|#)([^)\s\"#]+)")


def on_config(config: Any) -> Any:
    """Write the version below each page, and let readers edit pages once the project has an address."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    config.copyright = f"{config.site_name} {project['version']}"
    if address := project["urls"].get("Repository"):
        config.repo_url, config.repo_name, config.edit_uri = address, "Repository", "edit/main/docs/"
    return config


def on_post_build(config: Any) -> None:
    """Let the addresses of pages that were merged into others lead there."""
    for old, new in tomllib.loads(Path(__file__).with_name("redirects.toml").read_text()).items():
        page, _, heading = new.partition("#")
        Path(config.site_dir, f"{old}.html").write_text(MOVED.format(f"{page}.html{heading and '#' + heading}"))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of other files."""
    for name, page in FROM_ROOT.items():
        _add(files, config, page, (PROJECT / name).read_text())
    pages = tomllib.loads(Path(__file__).with_name("reference.toml").read_text())
    del pages["packages"]
    members = pages.pop("members")
    _add(files, config, "reference.md", _index(pages))
    for file, page in pages.items():
        _add(files, config, f"{file}.md", _entries(page, members))
    for file in list(files.documentation_pages()):
        for path in sorted(_outside(file)):
            if files.get_file_from_path(_copied(path)) is None:
                if not (PROJECT / path).is_file():
                    raise PluginError(f"{file.src_uri} links to {path}, which is no file of the project")
                files.append(File.generated(config, _copied(path), content=(PROJECT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links point to the site's pages and copies; rank records last in the search, without the appendices."""
    if page.file.src_uri in OUT_OF_SEARCH:
        page.meta["search"] = {"exclude": True}
    for section in page.ancestors:
        if section.title in BOOSTS:
            page.meta.setdefault("search", {"boost": BOOSTS[section.title]})
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
        heading, badges, gain, rest = markdown.split("\n\n", 3)
        buttons = " ".join(f"[{text}]({link}){{ .md-button .md-button--primary }}" for text, link in BUTTONS.items())
        markdown = "\n\n".join((heading, badges, gain, buttons, rest))
    folder = _folder(page.file)
    return _LINK.sub(lambda link: link[1] + _target(folder, link[2]), markdown)


def _add(files: Files, config: Any, name: str, text: str) -> None:
    files.append(File.generated(config, name, content=text))


def _folder(file: File) -> str:
    """Return the folder, within the project, that a page's links start from."""
    return "" if file.src_uri in FROM_ROOT.values() else "docs"


def _target(folder: str, link: str) -> str:
    path = posixpath.normpath(posixpath.join(folder, link))
    if path in FROM_ROOT:
        return FROM_ROOT[path]
    if posixpath.dirname(path).split("/")[0] == "docs":
        return posixpath.relpath(path, "docs")
    return _copied(path)


def _copied(path: str) -> str:
    return f"files/{path}.txt"


def _outside(file: File) -> set[str]:
    folder = _folder(file)
    paths = {posixpath.normpath(posixpath.join(folder, link)) for _, link in _LINK.findall(file.content_string)}
    return {path for path in paths if not path.startswith("docs/") and path not in FROM_ROOT}


def _entries(page: Page, members: dict[str, list[str]]) -> str:
    """Return a page of the reference, which mkdocstrings fills."""
    lines = [f"# {page['title']}", "", page["about"], ""]
    for name in _names(page):
        lines.append(f"::: {name}")
        options = page.get("options", {}) | ({"members": members[name]} if name in members else {})
        if options:
            lines.append(f"    options: {json.dumps(options)}")
        lines.append("")
    return "\n".join(lines)


def _names(page: Page) -> list[str]:
    return [f"{module}.{name}" for module, names in page["names"].items() for name in names]


def _index(pages: dict[str, Page]) -> str:
    """Return the page that lists all names, each with the first sentence of its docstring."""
    loader = griffe.GriffeLoader(search_paths=[PROJECT])
    for package in ("collectives", "mpicomp"):
        loader.load(package)
    loader.resolve_aliases(implicit=True)
    lines = ["# Reference", "", "Every public name, with its signature, types, units and errors.", ""]
    for file, page in pages.items():
        lines += [f"## [{page['title']}]({file}.md)", "", "| name | purpose |", "|---|---|"]
        for name in _names(page):
            docstring = loader.modules_collection[name].docstring
            if docstring is None:
                raise PluginError(f"{name} is in the reference and has no docstring")
            summary = " ".join(docstring.value.strip().partition("\n\n")[0].split())
            lines.append(f"| [`{name}`][{name}] | {summary.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)
