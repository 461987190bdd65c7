"""All-gather of the signs of a small vector, together with the ranks' reports.

Every rank merges the signs of all ranks in rank order with the same words. This takes half the rounds of any other
topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from collectives import Communicator
from collectives.annotations import Words, override
from collectives.progress.polling import until
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.sign import Sign, SignMerger
from mpicomp.kernels.streams import GROUP, source
from mpicomp.reducers.sign_merge import OneBitReducer, SignMerge
from mpicomp.step import Work


def sign_reducer(comm: Communicator, n: int, sign: SignMerger, reports: int) -> OneBitReducer:
    """Return the reducer that suits a vector of `n` elements; parameters as in `SignMerge`."""
    kind = SignGather if comm.gathers(Sign().nbytes(n)) else SignMerge
    return kind(comm, n, sign, reports)


class SignGather(OneBitReducer):
    """Reducer that sends every rank's signs to every rank. Parameters as in `SignMerge`."""

    brief = at_once = True

    def __init__(self, comm: Communicator, n: int, sign: SignMerger, reports: int) -> None:
        self._trace = comm.trace
        self.pieces = [range(n)] if n else []
        self.scratch: list[Words] = []
        self.second = None
        self.side_channel = SideChannel(comm, reports, 8 * -(-n // 64))
        self.bits = self.side_channel.tail.view(np.uint64)
        self._signs = [tail.view(np.uint64) for tail in self.side_channel.tails]
        self._words = np.empty((comm.size - 1, 8 * -(-n // GROUP)), np.uint64)
        self._sign = sign
        self._sources = [source(rank) for rank in range(comm.size)]
        self._drawn = -1  # step of the drawn words

    @override
    def prepare_step(self, step: int) -> None:
        if self._drawn != step:
            for held, words in enumerate(self._words, 1):
                self._sign.draw(0, step, self._sources[held], (1, held), words)
            self._drawn = step

    @override
    def run(self, call: VectorCall, encode: Work, decode: Work, encoded: Callable[[], None]) -> Iterator[bool]:
        traffic = call.traffic
        clock = traffic.clock
        start = clock()
        for piece in range(len(self.pieces)):
            if (on_device := encode(piece)) is not None:
                yield from until(on_device, call)
        encoded()
        sent = clock()
        if call.compare is None and self._drawn != call.step:  # else it is drawn while the ranks compare the call
            self.prepare_step(call.step)
        drawn = clock()
        yield from self.side_channel.collect(call, traffic)
        arrived = clock()
        if self._words.size:
            self.bits[:] = self._signs[0]
            for words, incoming in zip(self._words, self._signs[1:], strict=True):
                self._sign.merge(words, incoming, self.bits)
        merged = clock()
        for piece in range(len(self.pieces)):
            if (on_device := decode(piece)) is not None:
                yield from until(on_device, call)
        end = clock()
        traffic.seconds_encoding += sent - start
        traffic.seconds_waiting += arrived - drawn
        traffic.seconds_merging += merged - arrived + drawn - sent
        traffic.seconds_decoding += end - merged
        traffic.seconds_total += end - start
        if self._trace is not None:
            spans = {"encode": (start, sent), "prepare": (sent, drawn), "merge": (arrived, merged)}
            self._trace.phases(**spans, decode=(merged, end))
