"""How well each method has learned where it was tried: what decides between methods that are predicted alike.

docs/choosing.md has the same table, and says where each figure was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple


class Grade(IntEnum):
    """What trainings have shown of a method; the lower, the better."""

    AS_DENSE = 1  # within a point of dense in each of many trainings, with momentum and Adam too
    PROMISING = 2  # as dense in what was tried, which is little
    BEHIND = 3  # more than a point behind dense, or clearly above its loss, in a training of a usual kind
    COMPARED = 4  # there to compare others with: behind, or without a case of its own


class Learned(NamedTuple):
    """A grade, and what was found, as the end of a sentence that begins with the method."""

    grade: Grade
    told: str


_MARSIT = Learned(Grade.AS_DENSE, "ended within 0.73 points of dense in each of 15 trainings")
_WINNERS = Learned(Grade.AS_DENSE, "ended where marsit does in 15 trainings, within the spread of the seeds")
LEARNING: Mapping[str, Learned] = {
    "marsit-100": _MARSIT,
    "marsit": _MARSIT,
    "marsit-1-winner": _WINNERS,
    "marsit-2-winners": _WINNERS,
    "double-squeeze": Learned(Grade.PROMISING, "had dense's loss in the one training that was tried"),
    "one-bit-sgd": Learned(Grade.PROMISING, "had dense's loss in the two convex problems that were tried"),
    "ecq-sgd": Learned(Grade.PROMISING, "had dense's loss in the two convex problems that were tried"),
    "ef-signsgd": Learned(Grade.BEHIND, "ended as dense in one training, and 5 points behind in another"),
    "scalecom": Learned(Grade.BEHIND, "ended as dense without momentum, and 1 to 23 points behind with it"),
    "qsgd": Learned(Grade.BEHIND, "ended with a greater loss than dense in two of three trainings"),
    "majority-vote": Learned(Grade.COMPARED, "ended 1 and 5 points behind dense"),
    "ssdm": Learned(Grade.COMPARED, "ended 11 and 27 points behind dense"),
    "top-k-sgd": Learned(Grade.COMPARED, "ended with a greater loss than dense"),
    "terngrad": Learned(Grade.COMPARED, "ended 2 % above dense's loss in one of two problems"),
    "mem-sgd": Learned(Grade.COMPARED, "learns as double-squeeze, which sends less"),
    "local-top-k": Learned(Grade.COMPARED, "sends more with every rank, which scalecom does not"),
    "random-k": Learned(Grade.COMPARED, "sends elements without looking at them"),
}
