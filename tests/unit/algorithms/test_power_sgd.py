"""PowerSGD: its laws, and the published algorithm in plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import CollectiveMismatch, Communicator
from collectives.threads.run_local import run_local
from mpicomp import PowerSGD, redistribute
from mpicomp.feedback.low_rank import cut_into_blocks

SHAPES = ((8, 4, 3, 3), (32,), (40, 24), (6, 5), ())
N = 320 + 64 + 960 + 64 + 1


def places(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[slice, tuple[int, ...]]]:
    """Return each tensor's elements and shape; tensors begin at multiples of 64 elements."""
    found, start = [], 0
    for shape in shapes:
        n = int(np.prod(shape))
        found.append((slice(start, start + n), shape))
        start += -(-n // 64) * 64
    return found


def vector(*seed: int, dtype: str = "float32") -> NDArray[Any]:
    out = np.zeros(N, dtype)
    for some, shape in places():
        out[some] = np.random.default_rng(seed).standard_normal(shape).reshape(-1)
    return out


def test_tensors_are_matrices_where_their_factors_are_shorter() -> None:
    blocks = list(cut_into_blocks(N, [int(np.prod(shape)) for shape in SHAPES], SHAPES, 4))
    matrices = [(block.start, block.rows, block.cols) for block in blocks if block.rank]
    assert matrices == [(0, 8, 36), (384, 40, 24)]
    covered = np.zeros(N, int)
    for block in blocks:
        covered[block.elements(0, block.rows)] += 1
    assert (covered == 1).all()
    ends = [(block.left.stop, block.right.stop) for block in blocks]
    assert ends[-1] == (N - 288 - 960 + 4 * (8 + 40), 4 * (36 + 24))


@pytest.mark.parametrize(("n", "rows", "cols"), [(100, 10, 10), (103, 10, 10), (110, 10, 11), (6001, 77, 77)])
def test_without_a_shape_a_tensor_is_nearly_square(n: int, rows: int, cols: int) -> None:
    first, *rest = cut_into_blocks(n, None, None, 2)
    assert (first.rows, first.cols) == (rows, cols)
    assert sum(block.cols for block in rest) == n - rows * cols


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rank_of_the_shorter_side_gives_the_mean(dtype: str) -> None:
    def work(comm: Communicator) -> NDArray[Any]:
        aggregator = PowerSGD(24, start_step=0).start(comm, N, dtype=dtype, tensor_shapes=SHAPES)
        return aggregator.aggregate(vector(comm.rank, dtype=dtype))

    mean = np.mean([vector(rank, dtype=dtype) for rank in range(3)], axis=0)
    for result in run_local(3, work):
        np.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", 2e-6), ("float64", 1e-14), ("float16", 3e-3)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_results_and_the_mean_residual_add_up_to_the_mean_gradients(dtype: str, precision: float, ranks: int) -> None:
    steps = 8

    def work(comm: Communicator) -> Any:
        aggregator = PowerSGD(2).start(comm, N, dtype=dtype, tensor_shapes=SHAPES)
        results = [aggregator.aggregate(vector(comm.rank, step, dtype=dtype)) for step in range(steps)]
        return np.array(results, np.float64), aggregator.residual.copy()

    found = run_local(ranks, work)
    vectors = [[vector(rank, step, dtype=dtype) for step in range(steps)] for rank in range(ranks)]
    given = np.mean(vectors, axis=0, dtype=np.float64)
    assert len({results.tobytes() for results, _ in found}) == 1
    np.testing.assert_allclose(found[0][0][:2], given[:2], atol=steps * precision)  # dense
    pending = np.mean([residual for _, residual in found], axis=0, dtype=np.float64)
    assert np.abs(pending).max() > 1
    np.testing.assert_allclose(found[0][0].sum(0) + pending, given.sum(0), atol=steps * precision)


class Published:
    """The algorithm as its authors publish it, in float64: QR instead of Gram-Schmidt, and a local error.

    Their code subtracts a rank's own P Q_m^T from its residual; `own` chooses that.
    """

    def __init__(self, factors: Sequence[NDArray[Any]], own: bool) -> None:
        self.q, self.own = [one.T.astype(np.float64) for one in factors], own
        self.errors: dict[tuple[int, int], NDArray[Any]] = {}

    def step(self, gradients: Sequence[Sequence[NDArray[Any]]]) -> list[NDArray[Any]]:
        results = []
        for k, of_ranks in enumerate(zip(*gradients, strict=True)):
            sums = [one + self.errors.get((k, m), 0) for m, one in enumerate(of_ranks)]
            p = np.linalg.qr(np.mean([one @ self.q[k] for one in sums], 0))[0]
            own = [one.T @ p for one in sums]
            self.q[k] = np.mean(own, axis=0)
            results.append(p @ self.q[k].T)
            for m, one in enumerate(sums):
                self.errors[k, m] = one - (p @ own[m].T if self.own else results[-1])
        return results


@pytest.mark.parametrize(("ranks", "own"), [(1, False), (1, True), (3, False)])
def test_results_are_those_of_the_published_algorithm(ranks: int, own: bool) -> None:
    matrices = [(some, (shape[0], -1)) for some, shape in (places()[0], places()[2])]

    def work(comm: Communicator) -> Any:
        aggregator = PowerSGD(3, start_step=0).start(comm, N, dtype="float64", tensor_shapes=SHAPES)
        factors = aggregator.state_dict()["factors"]
        return factors, [aggregator.aggregate(vector(comm.rank, step, dtype="float64")) for step in range(6)]

    factors, results = run_local(ranks, work)[0]
    published = Published([factors[: 3 * 36].reshape(3, 36), factors[3 * 36 :].reshape(3, 24)], own)
    for step, result in enumerate(results):
        of_ranks = [vector(rank, step, dtype="float64") for rank in range(ranks)]
        expected = published.step([[one[some].reshape(shape) for some, shape in matrices] for one in of_ranks])
        for (some, shape), one in zip(matrices, expected, strict=True):
            np.testing.assert_allclose(result[some].reshape(shape), one, atol=1e-9)
        kept = places()[1][0]
        np.testing.assert_allclose(result[kept], np.mean(of_ranks, axis=0)[kept], atol=1e-12)


def test_matrices_that_were_zero_are_followed_once_they_are_not(comm: Communicator) -> None:
    aggregator = PowerSGD(2, start_step=0).start(comm, 40 * 40, tensor_shapes=[(40, 40)])
    rows, cols = np.random.default_rng(0).standard_normal((2, 40, 2)).astype(np.float32)
    late = rows @ cols.T
    early = np.zeros_like(late)
    early[0, 0] = 1  # of rank 1: the second factor has nothing to follow
    for matrix in (np.zeros_like(late), early):
        result = aggregator.aggregate(matrix.reshape(-1))
        np.testing.assert_allclose(result.reshape(40, 40), matrix, atol=1e-6)
    np.testing.assert_allclose(aggregator.aggregate(late.reshape(-1)).reshape(40, 40), late, atol=1e-4)


def test_the_factors_are_drawn_alike_on_all_ranks_and_by_the_seed() -> None:
    def work(comm: Communicator) -> list[bytes]:
        made = [(0, 0), (0, 1), (1, 0)]
        return [
            PowerSGD(seed=seed).start(comm, 6400, vector_id=number).state_dict()["factors"].tobytes()
            for seed, number in made
        ]

    first, *others = run_local(3, work)
    assert others == [first, first]
    assert len(set(first)) == 3


def test_ranks_whose_tensors_are_other_matrices_raise_a_mismatch() -> None:
    def work(comm: Communicator) -> None:
        shape = (64, 32) if comm.rank else (32, 64)
        aggregator = PowerSGD().start(comm, 2048, tensor_shapes=[shape])
        with pytest.raises(CollectiveMismatch, match=r"rows of 1 tensors \[32\]"):
            aggregator.aggregate(np.ones(2048, np.float32))

    run_local(2, work)


def test_ranks_that_load_other_factors_raise_a_mismatch() -> None:
    def work(comm: Communicator) -> None:
        aggregator, other = (PowerSGD(seed=seed).start(comm, 6400) for seed in (0, 1))
        aggregator.load_state_dict((other if comm.rank else aggregator).state_dict())
        with pytest.raises(CollectiveMismatch, match="factors"):
            aggregator.aggregate(np.ones(6400, np.float32))

    run_local(2, work)


def test_other_ranks_go_on_from_the_mean_residual_and_the_same_factors() -> None:
    def work(comm: Communicator) -> Any:
        aggregator = PowerSGD(2, start_step=0).start(comm, N, tensor_shapes=SHAPES)
        for step in range(3):
            aggregator.aggregate(vector(comm.rank, step))
        return aggregator.state_dict(), aggregator.state_kinds

    states, kinds = zip(*run_local(3, work), strict=True)
    assert (kinds[0]["residual"], kinds[0]["factors"]) == ("mean", "shared")
    merged = redistribute(states, 2, kinds[0])
    np.testing.assert_array_equal(merged[1]["factors"], states[0]["factors"])
    mean = np.mean([one["residual"] for one in states], axis=0, dtype=np.float64)
    np.testing.assert_array_equal(merged[0]["residual"], mean.astype(np.float32))


def test_a_step_that_is_taken_back_can_be_taken_again(comm: Communicator) -> None:
    aggregator = PowerSGD(2, start_step=1).start(comm, N, tensor_shapes=SHAPES)
    for step in range(4):
        before = aggregator.state_dict()
        first = aggregator.aggregate(vector(0, step))
        aggregator.undo()
        for key, value in before.items():
            np.testing.assert_array_equal(aggregator.state_dict()[key], value)
        np.testing.assert_array_equal(aggregator.aggregate(vector(0, step)), first)


def test_elements_sent_as_they_are_may_reach_the_largest_number(comm: Communicator) -> None:
    aggregator = PowerSGD(start_step=0).start(comm, 4, tensor_shapes=[(4,)])
    x = np.full(4, 3e38, np.float32)
    np.testing.assert_array_equal(aggregator.aggregate(x), x)


@pytest.mark.parametrize("shapes", [[64], 64, [(-8, -8)], [(0, 4), (64,)]], ids=str)
def test_shapes_that_are_none_are_refused_with_an_example(comm: Communicator, shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"tensor_shapes must be shapes .*, such as \[\(32, 16\), \(16,\)\], not"):
        PowerSGD().start(comm, 64, tensor_shapes=shapes)


def test_a_vector_without_elements_has_no_shapes(comm: Communicator) -> None:
    assert PowerSGD().start(comm, 0, tensor_shapes=[]).aggregate(np.empty(0, np.float32)).size == 0


def test_tensors_that_do_not_fill_the_vector_are_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="fill 1089 elements, not 1024"):
        PowerSGD().start(comm, 1024, tensor_shapes=[(32, 31), (20, 1), (1,)])
    with pytest.raises(ValueError, match="encodes vectors of float32 on the CPU alone"):
        PowerSGD().start(comm, 1024, tensor_shapes=[(32, 32)], device="cuda")
