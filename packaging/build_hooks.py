"""Hatchling's hooks: pages of the manual for wheels, and a README whose links work on a package index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"\((?!https?:|mailto:)([^)\s]+)\)"
_PICTURE, _LINK = re.compile(r"!\[([^\]]*)\]" + _RELATIVE), re.compile(r"(?<!!)\[([^\]]+)\]" + _RELATIVE)
_WITHOUT_ADDRESS = """
The pages that this text names come with the package: `mpicomp help` lists them, `mpicomp help quickstart` prints one.
"""


class ManualPages(BuildHookInterface):
    """Put the pages of docs next to `mpicomp.manual`, which reads docs itself in a checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the pages to a wheel."""
        if version != "editable":
            for page in sorted(Path(self.root, "docs").glob("*.md")):
                build_data["force_include"][str(page)] = f"mpicomp/manual/{page.name}"


class IndexReadme(MetadataHookInterface):
    """Make the README of the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Repository")
        readme = for_package_index(text, address, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def for_package_index(text: str, address: str | None, version: str) -> str:
    """Return a README with addresses of this version's files; without links to them while there is no repository."""
    if address is None:
        text = _PICTURE.sub(r"*Picture in the source archive: \1.*", text)
        return _LINK.sub(lambda link: link[1], text) + _WITHOUT_ADDRESS
    text = _PICTURE.sub(rf"![\1]({address}/raw/v{version}/\2)", text)
    return _LINK.sub(lambda link: f"[{link[1]}]({_target(link[2], address, version)})", text)


def _target(path: str, address: str, version: str) -> str:
    return path if path.startswith("#") else f"{address}/blob/v{version}/{path}"
