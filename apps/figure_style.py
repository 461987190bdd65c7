"""Style of all figures: matplotlib's settings, and one colour, marker and dash for each method and library.

The settings are a plain dict for `matplotlib.rc_context`, so that this module needs no matplotlib itself. Readers with
red-green colour blindness can distinguish the colours of a figure; markers and dashes repeat the distinction for prints
in grey.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

WIDTH_INCHES = 6.6
"""Width of a figure. Text of 10 points is then legible on a page of 800 pixels and on a phone of 390."""
INK, FAINT, PALE = "#222222", "#666666", "#d9d9d9"
"""Colours of text, of notes, and of helper lines."""
SETTINGS: Mapping[str, Any] = {
    "figure.facecolor": "white",  # opaque: pages may be dark
    "savefig.facecolor": "white",
    "savefig.dpi": 200,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures are the same on all machines
    "font.size": 10,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
}


class Look(NamedTuple):
    """Colour, marker and dash of a series, as matplotlib takes them."""

    color: str
    marker: str = "o"
    linestyle: Any = "-"


_DENSE, _LOCAL = Look("#4d4d4d", "o", (0, (5, 2))), Look("#b3b3b3", "X", (0, (2, 1.5)))
LOOKS: Mapping[str, Look] = {
    "dense": _DENSE,
    "fp32": _DENSE,
    "float32": _DENSE,
    "mean gradients": _DENSE,
    "local steps": _LOCAL,
    "dense, every": _LOCAL,
    "marsit": Look("#0072b2", "s"),
    "marsit, one winner": Look("#56b4e9", "D", (0, (4, 1, 1, 1))),
    "marsit, two winners": Look("#004c8c", "P", (0, (1, 1))),
    "relay": Look("#aa3377", "o"),
    "double-squeeze": Look("#009e73", "v"),
    "doublesqueeze": Look("#009e73", "v"),
    "one-bit-adam": Look("#c51b7d", "P"),
    "onebitadam": Look("#c51b7d", "P"),
    "scalecom": Look("#e69f00", "D"),
    "sparseloco": Look("#8c510a", "^"),
    "aq-sgd": Look("#332288", "s"),
    "directq": Look("#e08214", "^", (0, (4, 1, 1, 1))),
    "open mpi": Look("#d55e00", "^", (0, (4, 1, 1, 1))),
    "gloo": Look("#e7a3c8", "P", (0, (3, 1, 1, 1, 1, 1))),
    "ring": Look("#8c510a", "o"),
    "torus": Look("#e69f00", "s", (0, (5, 1.5))),
    "tree": Look("#5aae61", "^"),
    "double-tree": Look("#882255", "v", (0, (4, 1, 1, 1))),
    "halving-doubling": Look("#44aa99", "D", (0, (1, 1))),
}
"""Looks by the beginning of the name of a series, in lower case; the longest beginning counts."""
OTHERS = ("#6a7f94", "#bb5566", "#7f5a9b", "#ccbb44", "#66a2c8", "#a6761d", "#228833", "#333333")
"""Colours of series that are not in `LOOKS`, in the order in which a figure names them."""
MARKERS = "osv^DPX<>"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (4, 1, 1, 1)))


def known_look(name: str) -> Look | None:
    """Return the look of a series in every figure; None if its name begins with no name of `LOOKS`."""
    begins = [key for key in LOOKS if name.lower().startswith(key)]
    return LOOKS[max(begins, key=len)] if begins else None


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for each series of a figure, all different."""
    found: dict[str, Look] = {}
    others = 0
    for name in dict.fromkeys(names):
        # series of one method have its colour; unknown ones take the colours of `OTHERS` in turn
        look = known_look(name)
        if look is None:
            look = Look(OTHERS[others % len(OTHERS)], MARKERS[others % len(MARKERS)])
            others += 1
        variant = sum(one.color == look.color for one in found.values())
        if variant:
            place = MARKERS.index(look.marker) + variant
            dash = variant - (look.linestyle != "-")  # the first of a method's series may be dashed itself
            look = Look(look.color, MARKERS[place % len(MARKERS)], DASHES[dash % len(DASHES)])
        found[name] = look
    return found
