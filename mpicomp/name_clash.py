"""Another package named `collectives`, such as a folder in the user's project, that Python finds before ours."""

from __future__ import annotations

import sys
from pathlib import Path

OURS = Path(__file__).resolve().parent.with_name("collectives")


def require_ours() -> None:
    """Raise ImportError if `collectives` is another package than the one that comes with mpicomp."""
    found = sys.modules.get("collectives")
    place = None if found is None else next(iter(found.__path__), None)
    if place is not None and Path(place).resolve() != OURS:
        raise ImportError(
            f"mpicomp needs its package 'collectives', in {OURS.parent}, and Python finds another first, {place}: "
            "rename that folder, or start the program where it is not on the search path"
        )
