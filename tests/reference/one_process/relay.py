"""Relay with all ranks in one process, from the definition: partial sums are coded on every hop of the plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.levels import coded_rows
from tests.reference.one_process.allreduce import hops
from tests.reference.one_process.base import Simulation, Vectors


class OneProcess(Simulation):
    """A run of Relay over a topology, or with gathered codes."""

    def compute_step(self, g: Vectors) -> Vectors:
        sums = g if self.left_to_caller else g + self.residuals
        if self.size == 1:
            self.residuals[:] = 0
            return sums[0]
        if self.gathers and not self.left_to_caller:
            return self.gathered(sums)
        return self.relayed(sums.astype(np.float32))

    @property
    def left_to_caller(self) -> bool:
        """True if no residual is added to the next vector."""
        return bool(self.options.residual == "copy")

    def state(self, rank: int) -> dict[str, Vectors]:
        return {} if self.left_to_caller else {"residual": self.residuals[rank]}

    def buckets(self) -> list[slice]:
        """Return the buckets of all tensors, counted from the start of each."""
        bucket, cuts = self.options.bucket, []
        for start, length in zip(self.starts, self.lengths, strict=True):
            cuts += [slice(at, min(at + bucket, start + length)) for at in range(start, start + length, bucket)]
        return cuts

    def code(self, vector: Vectors, buckets: Sequence[slice], sent: Vectors) -> None:
        """Write the decoded values of some buckets to `sent`."""
        for length in {part.stop - part.start for part in buckets}:
            places = np.array([part.start for part in buckets if part.stop - part.start == length])
            rows = places[:, None] + np.arange(length)
            sent[rows] = coded_rows(vector[rows], self.options.levels, self.options.coding)[2]

    def gathered(self, sums: Vectors) -> Vectors:
        """Return the mean of all ranks' codes, of which each rank keeps the error of its own."""
        total = np.zeros(self.n, self.compute)
        for rank in range(self.size):
            sent = np.zeros(self.n, self.compute)
            self.code(sums[rank], self.buckets(), sent)
            for part in self.buckets():
                self.residuals[rank, part] = sums[rank, part] - sent[part]
            total = total + sent if rank else sent
        return total / self.compute(self.size)

    def relayed(self, sums: Vectors) -> Vectors:
        """Return the result of the plans' hops, in each of which a rank keeps the error of the code that it sends."""
        buckets = self.buckets()
        decoded, known = np.zeros((self.size, self.n), np.float32), np.zeros((self.size, len(buckets)), bool)

        def send(rank: int, some: range) -> None:
            new = [buckets[bucket] for bucket in some if not known[rank, bucket]]
            self.code(sums[rank], new, decoded[rank])
            for part in new:
                self.residuals[rank, part] = sums[rank, part] - decoded[rank, part]
            known[rank, some.start : some.stop] = True

        for hop in hops(self.topology, self.size, len(buckets), 1):
            some = range(hop.start, hop.stop)
            send(hop.source, some)
            for part in (buckets[bucket] for bucket in some):
                if hop.held_weight:
                    sums[hop.destination, part] += decoded[hop.source, part]
                else:
                    decoded[hop.destination, part] = decoded[hop.source, part]
            done = known[hop.destination, hop.start : hop.stop]
            assert not (hop.held_weight and done.any()), "a partial sum was sent before it was complete"
            done |= not hop.held_weight
        send(0, range(len(buckets)))
        result = np.zeros(self.n, np.float32)
        for part in buckets:
            result[part] = decoded[0, part] / np.float32(self.size)
        return result
