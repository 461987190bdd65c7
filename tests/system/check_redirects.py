"""Follow the addresses of pages that have been merged into others on the built site: ``make site``.

``python tests/system/check_redirects.py SITE`` fails where one leads to no page, or to a heading that is not there. It
needs the standard library alone.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

REDIRECTS = Path(__file__).resolve().parents[2] / "docs" / "site" / "redirects.toml"


def faults(site: Path) -> Iterator[str]:
    """Yield a line for each former address that leads nowhere."""
    for old in tomllib.loads(REDIRECTS.read_text()):
        page = site / f"{old}.html"
        if not page.is_file():
            yield f"{page.name}: no page of the site"
            continue
        found = re.search(r'http-equiv="refresh" content="0; url=([^"]+)"', page.read_text())
        name, _, heading = (found[1] if found else "").partition("#")
        if not name or not (site / name).is_file():
            yield f"{page.name}: leads to {name or 'no page'}"
        elif heading and f'id="{heading}"' not in (site / name).read_text():
            yield f"{page.name}: {name} has no heading #{heading}"


def main(argv: list[str]) -> int:
    """Run the program; return the exit status."""
    found = [f"redirects: {line}" for line in faults(Path(argv[0]))]
    print("\n".join(found) or "redirects: every former address leads to a page", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
