"""The checksum of a message changes with each of its bits."""

from __future__ import annotations

import numpy as np

from collectives.checksum import digest


def test_each_bit_changes_the_checksum() -> None:
    message = np.arange(24, dtype=np.uint8)
    digests = {digest(message)}
    for bit in range(8 * message.size):
        message[bit // 8] ^= 1 << bit % 8
        digests.add(digest(message))
        message[bit // 8] ^= 1 << bit % 8
    assert len(digests) == 1 + 8 * message.size
