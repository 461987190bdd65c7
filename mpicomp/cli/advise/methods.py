"""Methods that ``mpicomp advise`` compares, and their learning records.

A learning record decides between methods with about equal predictions. docs/choosing.md has the same table, with the
source of each figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from mpicomp.algorithms import ALGORITHMS, Algorithm, Marsit, algorithm


class Grade(IntEnum):
    """Learning record of a method in trainings; a lower grade is better."""

    AS_DENSE = 1  # within a point of dense in each of many trainings, with momentum and Adam too
    PROMISING = 2  # as dense in the few trainings that were tried
    BEHIND = 3  # more than a point behind dense, or clearly above its loss, in a training of a usual kind
    COMPARED = 4  # for comparison only: behind, or never the best choice


class Learned(NamedTuple):
    """A grade, and its reason, as the end of a sentence that begins with the method."""

    grade: Grade
    experience: str


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

# CascadingSSDM only shows that it fails. TrueTopK is a reference for studies: it sends more than a dense sum.
_LEFT_OUT = ("cascading-ssdm", "true-top-k")
METHODS: Mapping[str, Algorithm] = {
    "dense": algorithm("dense"),
    "marsit-100": Marsit(full_precision_every=100),
    "marsit": Marsit(full_precision_every=None),
    "marsit-1-winner": Marsit(full_precision_every=None, winners=1),
    "marsit-2-winners": Marsit(full_precision_every=None, winners=2),
    **{name: algorithm(name) for name in ALGORITHMS if name not in ("dense", "marsit", *_LEFT_OUT)},
}
COMPARED = frozenset(name for name, learned in LEARNING.items() if learned.grade is Grade.COMPARED)
"""Methods for comparison, advised only if no others were requested."""
