"""Base of sums whose ranks agree by counters in memory that they share."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import numpy as np

from collectives import Communicator, Traffic
from collectives.annotations import AnyArray, override
from collectives.arrays.elements import PAGE
from collectives.arrays.shared_memory import SharedMemory
from collectives.execution.call import Steps
from collectives.quoting import list_ranks
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.nodes.local_sum import LocalSum, SumTerms

TEXT_BYTES = 1 << 12  # name of a file, or the reason why there is no file
_SPACING = 16  # int64 words between two counters, which then lie in different lines of the cache
# Counters of a rank: steps whose sums or results are complete. The outcomes lie `_OUTCOMES` behind them.
SUMMED, DONE, _OUTCOMES = range(3)
FREE = 4
"""First of the counters that a class defines itself."""


class CountedSum(LocalSum):
    """Sums of ranks that count their steps in the first page of each one's segment. Parameters as in `LocalSum`."""

    def __init__(self, terms: SumTerms) -> None:
        super().__init__(terms)
        self._members, self._turn = terms.nodes.layout.members, 0
        self._memory: SharedMemory | None = None
        self._counters: list[AnyArray] = []

    def _map(self, memory: SharedMemory) -> None:
        """Take the segments, whose counters are 0."""
        self._memory = memory
        self._counters = [segment[:PAGE].view(np.int64)[::_SPACING] for segment in memory.segments]

    def _count(self, kind: int, count: int) -> None:
        """Set a counter of this rank, behind all that it has read and written before."""
        assert self._memory is not None
        self._memory.fence()
        self._counters[self._rank][kind] = count

    def _await(self, call: VectorCall, kind: int, count: int) -> Steps:
        """Wait until this counter of all ranks has come so far."""
        assert self._memory is not None
        counters, regroup = self._counters, call.group.recovery
        if any(one[kind] < count for one in counters):
            call.describe = partial(self._describe_behind, kind, count)
            while any(one[kind] < count for one in counters):
                if regroup is not None:
                    regroup.look()
                yield False
            if call.idle_turns:
                call.moved()
        self._memory.fence()

    def _describe_behind(self, kind: int, count: int) -> str:
        behind = [rank for rank, one in zip(self._members, self._counters, strict=True) if one[kind] < count]
        return f"{self.local.here}: {list_ranks(behind)} did not come to this step"

    @override
    def _begin(self, call: VectorCall, outcome: int) -> Generator[bool, None, int]:
        self._turn += 1
        return (yield from self._agree(call, SUMMED, outcome))

    def _report(self, kind: int, outcome: int) -> None:
        """Set the outcome of this rank's part of a step."""
        self._counters[self._rank][kind + _OUTCOMES] = outcome
        self._count(kind, self._turn)

    def _agree(self, call: VectorCall, kind: int, outcome: int) -> Generator[bool, None, int]:
        """Return the worst outcome of the node's ranks."""
        self._report(kind, outcome)
        yield from self._await(call, kind, self._turn)
        return max(int(one[kind + _OUTCOMES]) for one in self._counters)


class TextChannel:
    """Exchange of texts among the ranks of a node.

    Its tag is taken when it is made: later some ranks may have started another method, and others not.
    """

    def __init__(self, local: Communicator) -> None:
        self._channel = SideChannel(local, 0, TEXT_BYTES)

    def gather(self, call: VectorCall, text: str) -> Generator[bool, None, list[str]]:
        """Return the texts of the node's ranks."""
        tail, written = self._channel.tail, text.encode()[:TEXT_BYTES]
        tail[: len(written)] = np.frombuffer(written, np.uint8)
        tail[len(written) :] = 0
        yield from self._channel.swap(call, Traffic())
        return [bytes(one).rstrip(b"\0").decode(errors="replace") for one in self._channel.tails]
