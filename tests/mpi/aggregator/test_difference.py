"""A vector given as tensors before and after a step: the results are those of the vector itself."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import Communicator, NonFiniteGradient
from mpicomp import Marsit
from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.aggregator.difference import Difference
from tests.methods import METHODS
from tests.mpi.lanes import up_to_two_ranks

pytestmark = up_to_two_ranks

SHAPES = ((5000,), (3, 7), (), (4096 + 40, 3))  # in vectors: 5056, 64, 64, 12416
LENGTHS = tuple(int(np.prod(shape)) for shape in SHAPES)
STARTS = np.cumsum([0, *(-(-length // 64) * 64 for length in LENGTHS)]).tolist()
N = STARTS[-1]
STEPS = 5


class Model:
    """Tensors, and room for their differences."""

    def __init__(self, in_place: bool, turned: bool) -> None:
        rng = np.random.default_rng(1)
        self.before = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        self.vector = np.zeros(N, np.float32)
        self.views = [
            self.vector[start : start + length].reshape(shape)
            for start, length, shape in zip(STARTS, LENGTHS, SHAPES, strict=False)
        ]
        self.after = self.views if in_place else [one.copy() for one in self.before]
        if turned:
            self.before[3] = np.asfortranarray(self.before[3])

    def move(self, rank: int, step: int) -> Difference:
        rng = np.random.default_rng((rank, step))
        for before, after in zip(self.before, self.after, strict=True):
            after[...] = before - rng.standard_normal(before.shape).astype(np.float32)
        return Difference(self.before, self.after, self.views, self.vector)


@pytest.mark.parametrize(
    ("in_place", "turned"),
    [(True, False), (False, False), (False, True)],
)
@pytest.mark.parametrize("algorithm", METHODS.values(), ids=METHODS)
def test_a_difference_gives_what_its_vector_gives(
    comm: Communicator, algorithm: Algorithm, in_place: bool, turned: bool
) -> None:
    ours, plain = (algorithm.start(comm, N, tensor_lengths=LENGTHS, vector_id=0) for _ in range(2))
    one, other = Model(in_place, turned), Model(False, False)
    mean = np.empty(N, np.float32)
    for step in range(STEPS):
        moves = one.move(comm.rank, step)
        ours.begin(moves, mean).wait()
        if not moves.subtract_result():
            for before, start, length in zip(one.before, STARTS, LENGTHS, strict=False):
                before -= mean[start : start + length].reshape(before.shape)
        expected = plain.aggregate(other.move(comm.rank, step).take().copy())
        for mine, before, start, length in zip(one.before, other.before, STARTS, LENGTHS, strict=False):
            before -= expected[start : start + length].reshape(before.shape)
            np.testing.assert_array_equal(mine, before)
    if "Auto" not in str(algorithm):  # which keeps times
        for mine, theirs in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_marsit_neither_takes_a_difference_nor_unpacks_its_result(comm: Communicator) -> None:
    aggregator = Marsit(None, global_step=0.5).start(comm, N, tensor_lengths=LENGTHS)
    model, mean = Model(False, False), np.full(N, 7, np.float32)
    moves = model.move(comm.rank, 0)
    aggregator.aggregate(moves, mean)
    assert moves.subtract_result()
    assert (mean == 7).all()
    assert not model.vector.any()


def test_nan_in_a_difference_is_told_as_in_a_vector(comm: Communicator) -> None:
    aggregator = Marsit(None, global_step=0.5).start(comm, N, tensor_lengths=LENGTHS)
    model = Model(True, False)
    moves = model.move(comm.rank, 0)
    if comm.rank == comm.size - 1:
        model.after[1][2, 2] = np.nan
    with pytest.raises(NonFiniteGradient, match="NaN or infinity in vector 0") as raised:
        aggregator.aggregate(moves, np.empty(N, np.float32))
    assert raised.value.ranks == (comm.size - 1,)
    assert not moves.subtract_result()


def test_a_result_that_may_not_stay_packed_is_written(comm: Communicator) -> None:
    aggregator = Marsit(None, global_step=0.5).start(comm, N, tensor_lengths=LENGTHS)
    model, mean = Model(False, False), np.full(N, 7, np.float32)
    moves = model.move(comm.rank, 0)
    moves.may_stay_packed = False
    aggregator.aggregate(moves, mean)
    assert not moves.subtract_result()
    assert (np.abs(mean) == 0.5).all()
