"""Pieces between nodes are as long as every rank's MPI sends them eagerly."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from collectives.group.opening import (
    EAGER_LIMIT,
    HEADROOM,
    LEAST_EAGER_BYTES,
    MOST_EAGER_BYTES,
    USUAL_EAGER_BYTES,
    eager_piece_bytes,
)

WORLD = MPI.COMM_WORLD


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, USUAL_EAGER_BYTES - HEADROOM),
        ("131072", 131_072 - HEADROOM),
        ("4000000", MOST_EAGER_BYTES),
        ("1", LEAST_EAGER_BYTES),
        ("lots", USUAL_EAGER_BYTES - HEADROOM),
    ],
)
def test_pieces_follow_the_limit_that_mpi_was_told(
    monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int
) -> None:
    monkeypatch.delenv(EAGER_LIMIT, raising=False)
    if limit is not None:
        monkeypatch.setenv(EAGER_LIMIT, limit)
    assert eager_piece_bytes(WORLD, 60.0) == expected


def test_the_rank_with_the_lowest_limit_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EAGER_LIMIT, str(100_000 + WORLD.rank))
    assert eager_piece_bytes(WORLD, 60.0) == 100_000 - HEADROOM
