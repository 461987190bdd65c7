"""Shared selection: the reference's payloads and results to the bit, exact sizes, and nothing written besides."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp import Marsit
from mpicomp.codecs.shared_selection import MOST_RANKS, SharedSelection, Winners
from mpicomp.kernels.cpu.shared_selection import unpack_pair
from mpicomp.kernels.cpu.sign import encode, unpack
from mpicomp.kernels.streams import BLOCK, GROUP, Stream
from tests.contracts import guarded
from tests.reference import shared_selection as reference
from tests.reference.one_process.marsit import OneProcess
from tests.reference.signs import pack_bits

RANKS = (1, 2, 3, 4, 5, 7, 8, 11, 17)  # 11 meets odd numbers twice on its way to 1
STREAM = Stream(3, 1, "selection")
STEP = 5

Words = NDArray[np.uint64]


def lengths(ranks: int) -> tuple[int, ...]:
    return 0, 1, 63, 64, 65, 64 * ranks - 1, 64 * ranks, 64 * ranks + 1, 512 * ranks, 512 * ranks + 65, 6001, 300_001


def signs(ranks: int, n: int) -> NDArray[np.bool_]:
    """One row a rank."""
    return np.random.default_rng([ranks, n]).integers(0, 2, (ranks, n)).astype(bool)


def drawn(codec: SharedSelection, n: int, step: int = STEP, first: int = 0, stream: Stream = STREAM) -> Any:
    selection = codec.bind("cpu", stream)
    winners = selection.reserve(n)
    selection.draw(winners, step, first)
    return selection, winners


def payloads_of(codec: SharedSelection, selection: Any, winners: Winners, packed: list[Words], stride: int) -> Words:
    """Return the payloads of all ranks, `stride` words apart from each other."""
    words = codec.nbytes(winners.n) // 8
    with guarded(stride * codec.ranks, np.uint64) as payloads:
        for rank, bits in enumerate(packed):
            selection.encode(bits, rank, winners, payloads[stride * rank : stride * rank + words])
    return payloads


@pytest.mark.parametrize("votes", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_payloads_and_results_equal_the_reference(ranks: int, votes: int) -> None:
    codec = SharedSelection(ranks, votes)
    for n in lengths(ranks):
        positive = signs(ranks, n)
        packed = [pack_bits(row) for row in positive]
        before = [bits.copy() for bits in packed]
        who = reference.winners(n, ranks, votes, STREAM, STEP)
        selection, winners = drawn(codec, n)
        words = codec.nbytes(n) // 8
        stride = words + 3
        payloads = payloads_of(codec, selection, winners, packed, stride)
        for rank in range(ranks):
            expected = reference.payload(positive[rank], rank, who, ranks)
            np.testing.assert_array_equal(payloads[stride * rank : stride * rank + words], expected)
            assert (payloads[stride * rank + words : stride * (rank + 1)] == 77).all()
            np.testing.assert_array_equal(packed[rank], before[rank])
        with guarded(-(-n // 64), np.uint64) as first, guarded(-(-n // 64), np.uint64) as second:
            results = [first, second][: codec.votes]
            selection.decode(payloads, stride, winners, results)
        for bits, expected in zip(results, reference.votes_of(positive, who), strict=True):
            np.testing.assert_array_equal(bits, pack_bits(expected))


@pytest.mark.parametrize("votes", [1, 2])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_runs_are_drawn_as_their_part_of_the_whole(ranks: int, votes: int) -> None:
    codec = SharedSelection(ranks, votes)
    n = 5 * codec.alignment + 129
    positive = signs(ranks, n)
    packed = [pack_bits(row) for row in positive]
    who = reference.winners(n, ranks, votes, STREAM, STEP)
    expected = [pack_bits(row) for row in reference.votes_of(positive, who)]
    for cut in (codec.alignment, 3 * codec.alignment):
        for run in (range(cut), range(cut, n)):
            words, size = slice(run.start // 64, -(-run.stop // 64)), codec.nbytes(len(run)) // 8
            selection, winners = drawn(codec, len(run), first=run.start)
            payloads = payloads_of(codec, selection, winners, [bits[words] for bits in packed], size)
            results = [np.empty(words.stop - words.start, np.uint64) for _ in range(codec.votes)]
            selection.decode(payloads, size, winners, results)
            for bits, whole in zip(results, expected, strict=True):
                np.testing.assert_array_equal(bits, whole[words])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_groups_far_out_are_drawn_as_in_the_reference(ranks: int) -> None:
    """2^30 groups begin where the number of a Philox block passes 32 bits."""
    codec, n = SharedSelection(ranks, 2), 6 * 512 * ranks
    for group in (2**30 - 24, 2**32 - 24):
        first = 512 * ranks * group
        selection, winners = drawn(codec, n, first=first)
        positive = signs(ranks, n)
        payloads = payloads_of(codec, selection, winners, [pack_bits(row) for row in positive], codec.nbytes(n) // 8)
        results = [np.empty(n // 64, np.uint64) for _ in range(2)]
        selection.decode(payloads, codec.nbytes(n) // 8, winners, results)
        who = reference.winners(n, ranks, 2, STREAM, STEP, first)
        np.testing.assert_array_equal(results, [pack_bits(row) for row in reference.votes_of(positive, who)])


@pytest.mark.parametrize(
    ("ranks", "votes", "digest"),
    [
        (2, 1, "915733aba8b92195"),
        (3, 1, "21d2445d77c52ae2"),
        (3, 2, "30b4e8eae40bf091"),
        (4, 2, "25df5d15fbd10ea9"),
        (7, 1, "9ab8c17806d0d8c2"),
        (17, 2, "58080b0e0d81a32b"),
    ],
)
def test_winners_are_pinned(ranks: int, votes: int, digest: str) -> None:
    """Ranks that run other versions must draw the same winners, and results must repeat."""
    winners = drawn(SharedSelection(ranks, votes), 200_000)[1]
    distances = b"" if winners.distances is None else winners.distances.astype("<i8").tobytes()
    assert hashlib.sha256(winners.labels.tobytes() + distances).hexdigest()[:16] == digest


@pytest.mark.parametrize("ranks", [*RANKS, 16, 24, 4095, 4096])
def test_a_payload_is_the_rank_s_share_rounded_up_to_words(ranks: int) -> None:
    for n in (0, 1, 64, 64 * ranks, 64 * ranks + 1, 1_000_003):
        share = math.ceil(math.ceil(n / 64) / ranks)
        assert SharedSelection(ranks).nbytes(n) == 8 * share
        assert SharedSelection(ranks, 2).nbytes(n) == 8 * share * min(ranks, 2)


def test_runs_begin_at_whole_groups_and_whole_blocks_of_sums() -> None:
    for ranks in range(1, 4097):
        alignment = SharedSelection(ranks).alignment
        assert alignment % (GROUP * ranks) == 0
        assert alignment % BLOCK == 0
        assert alignment <= BLOCK * ranks
    assert [SharedSelection(ranks).alignment for ranks in (1, 2, 3, 4, 8, 16)] == [4096, 4096, 12288, 4096, 4096, 8192]


def test_memory_of_winners_stays_below_three_quarters_of_a_bit_an_element() -> None:
    n = 1_000_000
    for ranks in (*RANKS, 9, 33, 100):
        labels, distances = SharedSelection(ranks, 2).bind("cpu", STREAM).reserve(n)[2:]
        assert distances is not None or ranks == 1
        taken = labels.nbytes + (0 if distances is None else distances.nbytes)
        assert 8 * taken < 0.72 * n, ranks


@pytest.mark.parametrize(("ranks", "votes"), [(1, 1), (1, 2), (2, 2)])
def test_nothing_is_drawn_where_every_rank_wins(ranks: int, votes: int) -> None:
    """The result is made of all signs, in any stream, and no memory is taken for winners."""
    positive = signs(ranks, 1000)
    for stream in (STREAM, Stream(9, 9, "other")):
        codec = SharedSelection(ranks, votes)
        selection, winners = drawn(codec, 1000, stream=stream)
        assert winners.labels.size == 0
        size = codec.nbytes(1000) // 8
        payloads = payloads_of(codec, selection, winners, [pack_bits(row) for row in positive], size)
        results = [np.empty(16, np.uint64) for _ in range(codec.votes)]
        selection.decode(payloads, size, winners, results)
        found = np.sort([np.unpackbits(bits.view(np.uint8), count=1000, bitorder="little") for bits in results], axis=0)
        np.testing.assert_array_equal(found, np.sort(positive, axis=0))


def test_payloads_of_wrong_size_are_refused() -> None:
    codec = SharedSelection(3, 2)
    selection, winners = drawn(codec, 1000)
    size, bits = codec.nbytes(1000) // 8, np.zeros(16, np.uint64)
    for wrong in (size - 1, size + 1, 0):
        with pytest.raises(ValueError, match="damaged"):
            selection.encode(bits, 0, winners, np.zeros(wrong, np.uint64))
    with pytest.raises(ValueError, match="damaged"):
        selection.decode(np.zeros(3 * size - 1, np.uint64), size, winners, [bits, bits])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranks": 0}, "ranks must be an integer of 1 to"),
        ({"ranks": MOST_RANKS + 1}, "ranks must be an integer of 1 to"),
        ({"ranks": 2, "winners": 3}, "winners must be an integer of 1 to 2, not 3"),
        ({"ranks": 2, "winners": True}, "winners must be an integer of 1 to 2"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SharedSelection(**options)


# A whole step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("votes", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_of_the_kernels_are_those_of_the_simulation(dtype: Any, ranks: int, votes: int) -> None:
    n, s = 5 * 4096 + 67, dtype(0.75)
    codec, zero, tiny = SharedSelection(ranks, votes), dtype(0), np.nextafter(dtype(0), dtype(1))
    simulated = OneProcess(Marsit(None, global_step=0.75, seed=8, winners=votes), None, ranks, n, dtype)
    selection, size = codec.bind("cpu", Stream(8, 0, "selection")), codec.nbytes(n) // 8
    winners = selection.reserve(n)
    residuals, sums = np.zeros((ranks, n), dtype), np.zeros(-(-n // BLOCK))
    bits = [np.empty(-(-n // 64), np.uint64) for _ in range(codec.votes)]
    payloads, out = np.empty((ranks, size), np.uint64), np.empty(n, dtype)
    width = np.uint32 if dtype is np.float32 else np.uint64
    positive, negative = np.array([s, -s]).view(width)
    for step in range(4):
        updates = np.random.default_rng([ranks, step]).standard_normal((ranks, n)).astype(dtype)
        selection.draw(winners, step, 0)
        for rank in range(ranks):
            encode(updates[rank], None, residuals[rank], residuals[rank], bits[0], s, s, None, True, zero, tiny, sums)
            selection.encode(bits[0], rank, winners, payloads[rank])
        selection.decode(payloads.reshape(-1), size, winners, bits)
        if codec.votes == 1:
            unpack(*bits, positive, negative, False, out.view(width))
        else:
            unpack_pair(*bits, positive, width(0), negative, False, out.view(width))
        np.testing.assert_array_equal(out, simulated.step(updates))
        np.testing.assert_array_equal(residuals, simulated.residuals)
        assert set(np.unique(out)) == ({-s, s} if codec.votes == 1 else {-s, zero, s})
