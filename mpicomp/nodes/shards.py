"""Shards of a vector, of which each local rank of a node owns one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from collectives.execution.program import partition
from mpicomp.aggregator.parts import MessageModel, VectorSpec
from mpicomp.feedback.scale_groups import padded_lengths

WORD = 64  # elements; tensors of methods with scales begin at multiples of it


class Cuttable(Protocol):
    """Interface of a method that decides where vectors may be cut."""

    @property
    def needs_whole_tensors(self) -> bool:
        """True if vectors may be cut between tensors only."""
        ...

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """Return the sizes of messages, whose alignment shards have too."""
        ...


def cut(method: Cuttable, spec: VectorSpec, n_shards: int, ranks: int) -> tuple[range, ...]:
    """Return the shards: `n_shards` neighbouring parts of about equal length, which may be empty.

    They begin at multiples of 64 and of the method's alignment, or between tensors if the method needs these whole.

    Parameters
    ----------
    method : Cuttable
    spec : VectorSpec
    n_shards : int
    ranks : int
        Number of ranks that exchange a shard.
    """
    if method.needs_whole_tensors and spec.tensor_lengths is not None and spec.n:
        _, padded = padded_lengths(spec.tensor_lengths, spec.n)
        return _between_tensors(padded.tolist(), spec.n, n_shards)
    if method.needs_whole_tensors and spec.tensor_lengths is None:
        return (range(spec.n), *(range(spec.n, spec.n) for _ in range(n_shards - 1)))
    alignment = math.lcm(WORD, method.message_model(spec.n, spec.dtype, ranks, 1 << 20).alignment)
    return partition(spec.n, n_shards, alignment)


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


def shard_spec(spec: VectorSpec, shard: range, number: int, n_shards: int, whole_tensors: bool) -> VectorSpec:
    """Return the description of a shard; its random words differ from those of the other shards."""
    parts = tensor_parts(spec, shard)
    lengths = None if spec.tensor_lengths is None else tuple(count for _, count in parts)
    shapes = None
    if spec.tensor_shapes is not None and whole_tensors:
        shapes = tuple(spec.tensor_shapes[tensor] for tensor, _ in parts)
    vector_id = spec.vector_id * n_shards + number
    return replace(spec, n=len(shard), vector_id=vector_id, tensor_lengths=lengths, tensor_shapes=shapes)
