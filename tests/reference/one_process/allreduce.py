"""What an all-reduce computes, worked out in one process by walking all ranks' plans together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.execution.program import partition
from collectives.schedules.plan import Topology
from collectives.schedules.verify import all_plans, deliveries

DENSE_ALIGNMENT = 64


class Hop(NamedTuple):
    """Elements start .. stop going from one rank to another; `ordinal` counts the merges made there before."""

    source: int
    destination: int
    start: int
    stop: int
    weight: int
    held_weight: int
    ordinal: int


def hops(topology: Topology, size: int, n: int, alignment: int) -> Iterator[Hop]:
    """All messages of an all-reduce in an order in which they can be acted upon."""
    plans = all_plans(topology, size)
    cuts = partition(n, plans[0].n_chunks, alignment)
    merges = np.zeros((size, len(cuts)), int)
    for message in deliveries(plans):
        for chunk in message.chunks:
            ordinal = int(merges[message.destination, chunk])
            merges[message.destination, chunk] += message.held_weight > 0
            if cut := cuts[chunk]:
                ends = message.source, message.destination
                yield Hop(*ends, cut.start, cut.stop, message.weight, message.held_weight, ordinal)


def dense(topology: Topology, vectors: NDArray[Any], op: str = "sum") -> NDArray[Any]:
    """Sum or mean of the rows, in the plans' order of additions; float16 is summed in float32."""
    size, n = vectors.shape
    sums = vectors.astype(np.float32) if vectors.dtype == np.float16 else vectors.copy()
    for hop in hops(topology, size, n, DENSE_ALIGNMENT):
        part = slice(hop.start, hop.stop)
        if not hop.held_weight:
            sums[hop.destination, part] = sums[hop.source, part]
            continue
        sums[hop.destination, part] += sums[hop.source, part]
        if op == "mean" and hop.weight + hop.held_weight == size:
            sums[hop.destination, part] /= size
    assert (sums == sums[0]).all()
    return sums[0].astype(vectors.dtype)


def rounded(vector: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return a vector in a type, or as float32 what "bfloat16" makes of it."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        import torch

        return torch.from_numpy(np.asarray(vector, np.float32)).to(torch.bfloat16).float().numpy()
    return vector.astype(dtype)
