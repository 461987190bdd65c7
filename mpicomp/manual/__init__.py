"""Pages of the manual: the Markdown files of ``docs``, which a wheel carries in this folder."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from pydoc import pager

from collectives.quoting import shown, suggestion

# A checkout has no copies here, so that an edit of docs is what the command prints.
_FOLDERS = Path(__file__).parent, Path(__file__).parents[2] / "docs"
_CODE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_NOT_TEXT = re.compile(r"^<[^`\n]*>\n|!(?=\[)", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def topics() -> dict[str, Path]:
    """Return the file of each page by its topic, the name of the file without its ending."""
    pages: list[Path] = []
    for folder in _FOLDERS:
        pages = pages or sorted(folder.glob("*.md"))
    return {page.stem: page for page in pages}


def page_text(topic: str) -> str:
    """Return a page for a terminal: a link to a page is followed by its topic, and code is left as it is."""
    pages = topics()
    name = topic.rpartition("/")[2].removesuffix(".md") if isinstance(topic, str) else ""
    if name not in pages:
        name = _page_of_method(name, pages)
    if name not in pages:
        raise ValueError(f"there is no page {shown(topic)}{suggestion(name, pages)}: mpicomp help lists all pages")
    parts = _CODE.split(pages[name].read_text(encoding="utf-8"))
    return "".join(part if part.startswith("```") else _plain(part, pages) for part in parts)


def _page_of_method(name: str, pages: dict[str, Path]) -> str:
    """Return the topic that describes a method, by the links of the page "choose"; without one it is a young one."""
    if name not in import_module("mpicomp.algorithms").ALGORITHMS:
        return name
    table = pages["choose"].read_text(encoding="utf-8") if "choose" in pages else ""
    found = re.search(rf"^\| \[`{name}`\]\(([\w-]+)\.md", table, re.MULTILINE)
    return "contrib" if found is None else found[1]


def contents() -> str:
    """Return topics and titles of all pages, one a line."""
    pages = topics()
    width = max(map(len, pages), default=0)
    titles = {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in pages.items()}
    lines = [f"  {name:{width}}  {_plain(title, pages)}" for name, title in titles.items()]
    return "\n".join(["Pages of the manual, which mpicomp help TOPIC prints:", *lines, ""])


def help_page(topic: str | None = None) -> None:
    """Print a page of the manual, as ``mpicomp help TOPIC`` does.

    Parameters
    ----------
    topic : str, optional
        Name of a page, such as "faults" or "quickstart". None lists all pages.

    Raises
    ------
    ValueError
        There is no such page.

    Examples
    --------
    >>> import mpicomp
    >>> mpicomp.help_page("fault")
    Traceback (most recent call last):
        ...
    ValueError: there is no page 'fault' (did you mean 'faults'?): mpicomp help lists all pages
    """
    pager(contents() if topic is None else page_text(topic))


def _plain(text: str, pages: dict[str, Path]) -> str:
    """Return Markdown without pictures' marks, HTML and targets of links."""

    def named(link: re.Match[str]) -> str:
        words, target = link.groups()
        if target.startswith("http"):
            return f"{words} <{target}>"
        topic = target.partition("#")[0].rpartition("/")[2].removesuffix(".md")
        return f"{words} [{topic}]" if topic in pages and topic != words else words

    return _LINK.sub(named, _NOT_TEXT.sub("", text))
