"""Shards of a vector, of which each local rank of a node owns one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from collectives.execution.program import partition
from mpicomp.aggregator.parts import VectorSpec
from mpicomp.feedback.scale_groups import padded_lengths

WORD = 64  # elements; tensors of methods with scales begin at multiples of it


def cut(spec: VectorSpec, n_shards: int, alignment: int | None) -> tuple[range, ...]:
    """Return the shards: `n_shards` neighbouring parts of about equal length, which may be empty.

    They begin at multiples of 64 and of the alignment. None: they begin where tensors do.
    """
    if alignment is not None:
        return partition(spec.n, n_shards, math.lcm(WORD, alignment))
    _, padded = padded_lengths(spec.tensor_lengths, spec.n)
    return _between_tensors(padded.tolist(), spec.n, n_shards)


def _between_tensors(padded: Sequence[int], n: int, n_shards: int) -> tuple[range, ...]:
    """Return shards that end with the tensor that is nearest to an equal share."""
    ends = [0]
    for length in padded:
        ends.append(ends[-1] + length)
    bounds = [min(ends, key=lambda end: abs(end - n * shard / n_shards)) for shard in range(n_shards + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def tensor_parts(spec: VectorSpec, shard: range) -> list[tuple[int, int]]:
    """Return the tensors with elements in a shard: their numbers and how many elements."""
    if spec.tensor_lengths is None or not spec.n:
        return [(0, len(shard))]
    real, padded = padded_lengths(spec.tensor_lengths, spec.n)
    parts, start = [], 0
    for number, (length, taken) in enumerate(zip(real.tolist(), padded.tolist(), strict=True)):
        inside = min(start + length, shard.stop) - max(start, shard.start)
        if inside > 0:
            parts.append((number, inside))
        start += taken
    return parts


def shard_spec(spec: VectorSpec, shard: range, number: int, n_shards: int, keeps_shapes: bool) -> VectorSpec:
    """Return the description of a shard; its random words differ from those of the other shards."""
    parts = tensor_parts(spec, shard)
    lengths = None if spec.tensor_lengths is None else tuple(count for _, count in parts)
    shapes = None
    if spec.tensor_shapes is not None and keeps_shapes and parts:
        shapes = tuple(spec.tensor_shapes[tensor] for tensor, _ in parts)
    vector_id = spec.vector_id * n_shards + number
    return replace(spec, n=len(shard), vector_id=vector_id, tensor_lengths=lengths, tensor_shapes=shapes)
