"""Check the archives in a folder before they are published: ``python packaging/check_dist.py dist``."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
NEEDED = ("collectives/py.typed", "mpicomp/py.typed", "mpicomp/cli/run/templates/run.sbatch")


def problems(folder: Path) -> list[str]:
    """Return what the wheel and the source archive lack or have too much of."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        about = message_from_bytes(archive.read(metadata))
    with tarfile.open(source) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    pages = {f"mpicomp/manual/{page.name}" for page in (PROJECT / "docs").glob("*.md")}
    foreign = {name for name in names if name.split("/")[0] not in ("collectives", "mpicomp", metadata.split("/")[0])}
    readme = str(about.get_payload())
    relative = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", readme)
    return [
        *(f"{wheel.name} lacks {name}" for name in sorted({*NEEDED, *pages} - names)),
        *(f"{wheel.name} has {name}" for name in sorted(foreign)),
        *(
            f"{source.name} lacks {name}"
            for name in ("README.md", "tests/conftest.py", "docs/faults.md")
            if name not in sources
        ),
        *(f"the README of {wheel.name} has the relative link {link}" for link in relative),
        *(
            f"METADATA has no {key}"
            for key in ("Classifier", "License-Expression", "Summary", "Project-URL")
            if key not in about
        ),
    ]


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]}: wheel and source archive are complete")
    sys.exit(bool(found))
