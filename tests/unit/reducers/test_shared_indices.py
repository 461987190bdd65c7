"""Options and layout of ScaleCom, random-k and true top-k, and steps of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomp import Communicator
from mpicomp.algorithms import RandomK, ScaleCom, TrueTopK
from mpicomp.codecs.top_k import count_kept
from mpicomp.feedback.chunk_parts import PART_ELEMENTS, lay_out

N = 4096 + 77


def test_rates_are_those_of_a_vectors_segments() -> None:
    assert ScaleCom(rate=7).rates_of(3) == (7,)
    assert ScaleCom(rates=[25, 50]).rates_of(3) == (25, 50)
    nested = ScaleCom(rates=[[25, 50], [400]])
    assert nested == ScaleCom(rates=((25, 50), (400,)))
    assert hash(nested) == hash(ScaleCom(rates=((25, 50), (400,))))
    assert [nested.rates_of(vector) for vector in (0, 1)] == [(25, 50), (400,)]
    with pytest.raises(ValueError, match="rates must have a tuple for each vector, not 2: there is 2"):
        nested.rates_of(2)
    with pytest.raises(ValueError, match="chunk must be None or a multiple of 50"):
        ScaleCom(rates=(25, 50), chunk=25)


def test_rates_that_are_not_as_many_as_the_segments_are_refused(comm: Communicator) -> None:
    for tensor_lengths in (None, (64,), (64, 64, 64)):
        n = sum(tensor_lengths or (192,))
        with pytest.raises(ValueError, match=r"vector 0 has \d tensors, but rates has 2 for it"):
            ScaleCom(rates=(25, 50)).start(comm, n, tensor_lengths=tensor_lengths)


@given(
    lengths=st.lists(st.integers(1, 3 * PART_ELEMENTS), min_size=1, max_size=4),
    rate=st.sampled_from([1, 7, 100, 400]),
    times=st.sampled_from([None, 1, 3, 5000]),
)
def test_parts_are_whole_chunks_that_follow_each_other(lengths: list[int], rate: int, times: int | None) -> None:
    rates = [rate, 2 * rate, rate, 1][: len(lengths)]
    chunk = None if times is None else 2 * rate * times
    parts = lay_out(lengths, rates, chunk)
    ends = np.cumsum(lengths)
    start = first = 0
    for part in parts:
        segment = int(np.searchsorted(ends, start, side="right"))
        begin = ends[segment] - lengths[segment]
        assert (part.start, part.first) == (start, first)
        assert part.chunk == (chunk or rates[segment])
        assert part.keep * rates[segment] == part.chunk
        assert (part.start - begin) % part.chunk == 0
        assert part.stop == ends[segment] or (part.stop - begin) % part.chunk == 0
        assert part.stop - part.start <= max(PART_ELEMENTS, part.chunk)
        assert part.last - part.first == count_kept(part.stop - part.start, part.chunk, part.keep)
        start, first = part.stop, part.last
    assert start == sum(lengths)
    assert first == sum(
        count_kept(length, chunk or one, (chunk or one) // one) for length, one in zip(lengths, rates, strict=True)
    )


def test_exact_segments_are_one_chunk_each() -> None:
    parts = lay_out([1000, 64, 1], [100, 30, 30], None, exact=True)
    assert [(part.start, part.stop, part.chunk, part.keep) for part in parts] == [
        (0, 1000, 1000, 10),
        (1000, 1064, 64, 3),
        (1064, 1065, 1, 1),
    ]
    assert lay_out([0], [100], None, exact=True) == ()


def test_vectors_under_one_seed_draw_differently(comm: Communicator) -> None:
    def places(vector_id: int, seed: int = 0) -> Any:
        aggregator = RandomK(10, seed=seed).start(comm, N, vector_id=vector_id)
        aggregator.aggregate(np.ones(N, np.float32))
        return aggregator.feedback.places

    first = places(0)
    np.testing.assert_array_equal(places(0), first)
    assert (places(1) != first).any()
    assert (places(0, seed=1) != first).any()


@pytest.mark.parametrize("options", [ScaleCom(20, chunk=100), RandomK(20), TrueTopK(20)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_messages_are_as_long_as_the_values_and_their_places(options: Any, dtype: str) -> None:
    wire = options.message_model(10**6, dtype, 4, 1 << 16)
    summing = 8 if dtype == "float64" else 4
    complete = 2 if dtype == "float16" else summing
    if isinstance(options, TrueTopK):
        assert wire.nbytes(1000, 1) == 1000 * summing
        return
    bits = 7 if isinstance(options, ScaleCom) else 0
    once = bits * 50 / 8 * 4 / (2 * 3)  # of a ring's phases each sends 3/4, and places go round once
    assert wire.nbytes(1000, 1) == int(np.ceil(50 * summing + once))
    assert wire.nbytes(1000, 4) == int(np.ceil(50 * complete + once))
    assert wire.piece_elements % wire.alignment == 0
