"""Cascading compression with all ranks in one process: every hop decodes, adds and compresses anew."""

from __future__ import annotations

import numpy as np

from collectives.execution.program import partition
from mpicomp.codecs import Draw, StochasticSign
from mpicomp.codecs.stochastic_sign import norm
from tests.reference.one_process.allreduce import hops
from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.signs import unpack_bits
from tests.reference.stochastic_signs import stochastic_bits


class OneProcess(Simulation):
    """A run of cascading SSDM over a topology, for the options of which no result is normalised."""

    def compute_step(self, g: Vectors) -> Vectors:
        assert not self.options.normalise
        stream, sums = self.stream("stochastic sign"), g.astype(np.float32)
        held: dict[tuple[int, int], Vectors] = {}  # by rank and start: the signs times the norm
        made: dict[tuple[int, int], int] = {}
        final: set[tuple[int, int]] = set()

        def compress(rank: int, part: slice) -> None:
            here = rank, part.start
            made[here] = made.get(here, -1) + 1
            held[here] = self.signs(sums[rank, part], Draw(stream, self.t, rank, made[here], part.start))

        for hop in hops(self.topology, self.size, self.n, StochasticSign().alignment):
            part = slice(hop.start, hop.stop)
            if (hop.source, hop.start) not in final:
                compress(hop.source, part)
            here, incoming = (hop.destination, hop.start), held[hop.source, hop.start]
            if not hop.held_weight:
                held[here] = incoming
                final.add(here)
                continue
            sums[hop.destination, part] += incoming
            if hop.weight + hop.held_weight == self.size:
                compress(hop.destination, part)
                final.add(here)
        result = np.empty(self.n, np.float32)
        for cut in partition(self.n, self.topology.plan(0, self.size).n_chunks, StochasticSign().alignment):
            part = slice(cut.start, cut.stop)
            if cut:
                if self.size == 1:
                    compress(0, part)
                result[part] = held[0, cut.start]
        most = np.finfo(self.dtype).max  # amplitudes grow from hop to hop, and float16 ends soon
        return np.clip(result / np.float32(self.size), -most, most)

    def signs(self, values: Vectors, draw: Draw) -> Vectors:
        """Return a stochastic sign of each element times the norm of all."""
        scale = norm(values)
        at = draw.offset // 512, draw.step, int(draw.source)
        up = unpack_bits(stochastic_bits(values, scale, draw.stream.key(), *at), values.size)
        return np.where(up, scale, -scale).astype(values.dtype)
