"""Another module named `collectives`, such as a folder in the user's project, that Python finds before ours."""

from __future__ import annotations

import sys
from pathlib import Path

OURS = Path(__file__).resolve().parent.with_name("collectives")


def require_ours() -> None:
    """Raise ImportError if `collectives` is another module than the package that comes with mpicomp."""
    found = sys.modules.get("collectives")
    place = next(iter(getattr(found, "__path__", ())), getattr(found, "__file__", None))
    if place and Path(place).resolve() != OURS:
        raise ImportError(
            f"mpicomp needs its package 'collectives', in {OURS.parent}, and Python finds another first, {place}: "
            "rename it, or start the program where it is not on the search path"
        )
