"""The methods that Marsit's paper compares, as they are timed."""

from __future__ import annotations

from mpicomp import SSDM, Dense, EFSignSGD, MajorityVote, Marsit
from mpicomp.algorithms import Algorithm

TIMED: dict[str, Algorithm] = {
    "PSGD": Dense(),
    "signSGD": MajorityVote(),
    "EF-signSGD": EFSignSGD(),
    "SSDM": SSDM(),
    "Marsit": Marsit(None),
}
