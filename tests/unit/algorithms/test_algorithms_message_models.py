"""Sizes, lengths and routes of the messages that methods announce, against a record of all of them.

``python -m tests.unit.algorithms.test_algorithms_message_models`` records them again. A method without a record is left
out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.methods import METHODS

RECORD = Path(__file__).with_name("message_models.json")
RANKS, LENGTHS, PIECE_BYTES = (1, 2, 3, 8, 64), (1, 65, 6001, 300_001, 10_000_000), (1 << 12, 57_344, 1 << 20)


def digest(name: str) -> str:
    """Return a digest of a method's models for these ranks, lengths and pieces."""
    found = hashlib.sha256()
    for dtype in ("bfloat16", "float32", "float64"):
        for ranks in RANKS:
            for n in LENGTHS:
                for piece_bytes in PIECE_BYTES:
                    model = METHODS[name].message_model(n, dtype, ranks, piece_bytes)
                    longest = min(n, model.piece_elements)
                    nbytes = [model.nbytes(count, weight) for count in (longest, n) for weight in sorted({1, ranks})]
                    fields = (model.piece_elements, model.alignment, model.route, model.decoded_once, *nbytes)
                    found.update(repr(fields).encode())
    return found.hexdigest()[:16]


RECORDED = json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_message_models_are_those_of_the_record(name: str) -> None:
    assert digest(name) == RECORDED[name]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: digest(name) for name in METHODS}, indent=1) + "\n")
