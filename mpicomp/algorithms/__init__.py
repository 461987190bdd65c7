"""Methods: one file each, a frozen dataclass of options and its aggregator."""

from __future__ import annotations

from typing import Any

from mpicomp.algorithms.base import Aggregator, Algorithm
from mpicomp.algorithms.cascading import CascadingSSDM
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.ef_signsgd import EFSignSGD
from mpicomp.algorithms.majority import MajorityVote
from mpicomp.algorithms.marsit import Marsit
from mpicomp.algorithms.ssdm import SSDM

ALGORITHMS: dict[str, type[Algorithm]] = {
    "dense": Dense,
    "marsit": Marsit,
    "cascading-ssdm": CascadingSSDM,
    "majority-vote": MajorityVote,
    "ef-signsgd": EFSignSGD,
    "ssdm": SSDM,
}


def algorithm(name: str, **options: Any) -> Algorithm:
    """A method by its command-line name, such as ``algorithm("marsit", full_precision_every=None)``.

    Raises
    ------
    ValueError
        No such method, or an option out of range.
    TypeError
        No such option.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}: choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](**options)


__all__ = [
    "ALGORITHMS",
    "SSDM",
    "Aggregator",
    "Algorithm",
    "CascadingSSDM",
    "Dense",
    "EFSignSGD",
    "MajorityVote",
    "Marsit",
    "algorithm",
]
