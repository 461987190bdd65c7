"""Vectors whose sum every rank knows, and the check of a result.

Each rank's vector repeats a block of its own, of a length that is prime: an element in a wrong place shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.arrays.elements import aligned_empty

BLOCK = 1_000_003
TOLERANCE = 1e-5  # of the sum of magnitudes

Vector = NDArray[np.float32]


class WrongResult(RuntimeError):
    """An implementation computes a wrong result."""


@cache
def block(rank: int) -> Vector:
    """A rank's block; none of its elements is zero."""
    made = np.random.default_rng((0, rank)).standard_normal(BLOCK, np.float32)
    made[made == 0] = 1
    return made


def make_vectors(n: int, rank: int) -> tuple[Vector, Vector]:
    """A rank's vector, and zeros."""
    x, out = aligned_empty(n, np.float32), aligned_empty(n, np.float32)
    for part in parts(x):
        part[:] = block(rank)[: part.size]
    out[:] = 0
    return x, out


def parts(x: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The repetitions of the block in a vector."""
    for start in range(0, x.size, BLOCK):
        yield x[start : start + BLOCK]


class Check:
    """Raises WrongResult on all ranks unless results are right; collective."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        blocks = np.stack([block(rank) for rank in range(comm.size)])
        votes = np.sign(blocks).sum(axis=0)
        self._sum: Vector = blocks.sum(axis=0, dtype=np.float64).astype(np.float32)
        self._bound: Vector = np.float32(TOLERANCE) * np.abs(blocks).sum(axis=0)
        self._unanimous, self._sign = np.abs(votes) == comm.size, np.sign(votes)

    def dense(self, name: str, out: Vector) -> None:
        """Every rank has the sum."""
        right = all(
            bool((np.abs(part - self._sum[: part.size]) <= self._bound[: part.size]).all()) for part in parts(out)
        )
        self._agree(name, right, "the sum")

    def one_bit(self, name: str, out: Vector) -> None:
        """Every rank has the same bits, of one magnitude, and the ranks' common sign where they have one."""
        right = bool(np.abs(out[:BLOCK]).min() == np.abs(out[:BLOCK]).max() > 0)
        for part in parts(out):
            common = self._unanimous[: part.size]
            right = right and bool((np.sign(part[common]) == self._sign[: part.size][common]).all())
        mine = hashlib.blake2b(out.data, digest_size=8).digest()
        self._agree(name, right and len(set(self._comm.allgather(mine))) == 1, "one and the same merge of signs")

    def _agree(self, name: str, right: bool, what: str) -> None:
        wrong = [rank for rank, fine in enumerate(self._comm.allgather(right)) if not fine]
        if wrong:
            raise WrongResult(f"{name}: on ranks {wrong} of {self._comm.size} the result is not {what}")
