"""Which methods are predicted, and which of them are advised."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomp.algorithms import ALGORITHMS, Algorithm, Marsit, algorithm

# CascadingSSDM is there to show that it fails, TrueTopK to study others by: it sends more than a dense sum.
_LEFT_OUT = ("cascading-ssdm", "true-top-k")
METHODS: Mapping[str, Algorithm] = {
    "dense": algorithm("dense"),
    "marsit-100": Marsit(full_precision_every=100),
    "marsit": Marsit(full_precision_every=None),
    "marsit-1-winner": Marsit(full_precision_every=None, winners=1),
    "marsit-2-winners": Marsit(full_precision_every=None, winners=2),
    **{name: algorithm(name) for name in ALGORITHMS if name not in ("dense", "marsit", *_LEFT_OUT)},
}
COMPARED = frozenset(("majority-vote", "ssdm", "mem-sgd", "terngrad", "local-top-k", "top-k-sgd", "random-k"))
"""Predicted to compare others with; advised only where nothing else was asked for."""


def chosen(text: str) -> tuple[str, ...]:
    """The methods of ``"marsit,scalecom"``, in the order of `METHODS`; dense is always one of them.

    Raises
    ------
    ValueError
        There is no such method, or dense is the only one.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in METHODS), None)
    if unknown is not None:
        raise ValueError(f"--methods {text}: there is no {unknown!r}: choose from {', '.join(METHODS)}")
    if set(names) == {"dense"}:
        raise ValueError(f"--methods {text}: name one or more to compare with dense")
    return tuple(name for name in METHODS if name == "dense" or name in names)
