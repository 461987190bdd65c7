"""Relay with all ranks in one process, from the definition: partial sums are coded on every hop of the plans."""

from __future__ import annotations

import numpy as np

from tests.reference.levels import coded
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

    def gathered(self, sums: Vectors) -> Vectors:
        """Return the mean of all ranks' codes, of which each rank keeps the error of its own."""
        total = np.zeros(self.n, self.compute)
        for rank in range(self.size):
            sent = np.zeros(self.n, self.compute)
            for part in self.buckets():
                sent[part] = coded(sums[rank, part], self.options.levels, self.options.coding)[2]
                self.residuals[rank, part] = sums[rank, part] - sent[part]
            total = total + sent if rank else sent
        return total / self.compute(self.size)

    def relayed(self, sums: Vectors) -> Vectors:
        """Return the result of the plans' hops, in each of which a rank keeps the error of the code that it sends."""
        buckets = self.buckets()
        decoded: dict[tuple[int, int], Vectors] = {}  # by rank and bucket

        def send(rank: int, bucket: int) -> Vectors:
            if (rank, bucket) not in decoded:
                part = buckets[bucket]
                sent = coded(sums[rank, part], self.options.levels, self.options.coding)[2]
                decoded[rank, bucket], self.residuals[rank, part] = sent, sums[rank, part] - sent
            return decoded[rank, bucket]

        for hop in hops(self.topology, self.size, len(buckets), 1):
            for bucket in range(hop.start, hop.stop):
                sent = send(hop.source, bucket)
                if hop.held_weight:
                    assert (hop.destination, bucket) not in decoded, "a partial sum was sent before it was complete"
                    sums[hop.destination, buckets[bucket]] += sent
                else:
                    decoded[hop.destination, bucket] = sent
        result = np.zeros(self.n, np.float32)
        for bucket, part in enumerate(buckets):
            result[part] = send(0, bucket) / np.float32(self.size)
        return result
