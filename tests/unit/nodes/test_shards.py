"""Cuts of vectors into shards, and the arguments with which the method between nodes is started."""

from __future__ import annotations

import pytest

from mpicomp.aggregator.spec import VectorSpec
from mpicomp.nodes.shards import cut, shard_spec, tensor_parts


def test_every_shard_of_every_vector_draws_random_words_of_its_own() -> None:
    specs = [VectorSpec(1000, "float32", vector) for vector in range(3)]
    numbers = [shard_spec(one, range(500), shard, 4, False).vector_id for one in specs for shard in range(4)]
    assert len({*numbers}) == 12
    assert [shard_spec(one, range(1000), 0, 1, False).vector_id for one in specs] == [0, 1, 2]


@pytest.mark.parametrize("alignment", [1, 64, 100, None])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_make_up_the_vector_and_begin_where_the_method_may_be_cut(shards: int, alignment: int | None) -> None:
    lengths = (700, 5, 6400, 33)
    spec = VectorSpec(704 + 64 + 6400 + 33, "float32", 0, lengths)
    found = cut(spec, shards, alignment)
    assert len(found) == shards
    assert [element for shard in found for element in shard] == [*range(spec.n)]
    starts = {0, 704, 768, 7168, spec.n}
    assert all(
        shard.start in starts if alignment is None else shard.start % 64 == shard.start % alignment == 0
        for shard in found
        if shard
    )
    assert sum(count for shard in found for _, count in tensor_parts(spec, shard)) == sum(lengths)
