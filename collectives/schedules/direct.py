r"""Direct all-reduce: every rank owns a part, gets it from all others, and sends them the result.

Four ranks, chunk c owned by rank c::

    turn 1        0 -> 1 (chunk 1)    1 -> 2 (chunk 2)    2 -> 3 (chunk 3)    3 -> 0 (chunk 0)     1 rank, merged
    turns 2, 3    0 -> 2 (chunk 2)    ...                                                          1 rank, merged
    turns 4 .. 6  0 -> 1 (chunk 0)    1 -> 2 (chunk 1)    ...                                      4 ranks, overwriting

Rounds 2 (M - 1), or 2 where a rank can send to all at once; bytes sent per rank 2 (M - 1)/M of the vector. Each element
is merged M - 1 times by one rank, and nobody merges what others have merged: what two-pass compression wants, which
turns a shard into numbers and back only once between worker and owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectives.schedules.plan import Plan, TopologyError, Transfer, steps_by_time


@dataclass(frozen=True, slots=True)
class Direct:
    """All-to-all reduce-scatter, then all-to-all all-gather.

    Parameters
    ----------
    segments : int
        Chunks of each rank's part, which follow each other out and back.

    Raises
    ------
    TopologyError
        `segments` is below 1.
    """

    name: ClassVar[str] = "direct"
    segments: int = 4

    def __post_init__(self) -> None:
        if self.segments < 1:
            raise TopologyError(f"a direct all-reduce needs at least 1 segment, not {self.segments}")

    def plan(self, rank: int, size: int) -> Plan:
        """Rank ``rank``'s part among ``size`` ranks."""
        sends, recvs = [], []
        for segment in range(self.segments):
            for turn in range(1, size):
                to, source = (rank + turn) % size, (rank - turn) % size
                out = segment * (size - 1) + turn
                back = out + size - 1
                sends += [
                    (out, Transfer(to, self._chunk(to, segment), 1)),
                    (back, Transfer(to, self._chunk(rank, segment), size)),
                ]
                recvs += [
                    (out, Transfer(source, self._chunk(rank, segment), 1, turn)),
                    (back, Transfer(source, self._chunk(source, segment), size)),
                ]
        return Plan(rank, size, size * self.segments, steps_by_time(sends, recvs))

    def _chunk(self, owner: int, segment: int) -> range:
        chunk = owner * self.segments + segment
        return range(chunk, chunk + 1)
