"""Relay on ranks that are threads: nothing is lost, limits of its error, failures, its options and its traffic."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import CollectiveMismatch, DoubleTree, HalvingDoubling, Ring, Star, Torus, Tree
from mpicomp import Auto, Communicator, DoubleSqueeze, NonFiniteGradient, PerNode, Relay, redistribute, run_local
from mpicomp.algorithms.relay import MOST_GATHERED, quiet_route
from tests.mpi.lanes import topologies
from tests.reference.levels import in_levels

LEVELS = (2, 3, 4, 8, 16, 256)
N = 5003
SHORT = 700  # elements of which "auto" gathers the codes
LENGTHS = (2000, 1, 700, N - 2048 - 64 - 704)
every_count = pytest.mark.parametrize("levels", LEVELS)


def vector(rank: int, step: int = 0, n: int = N, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng((rank, step)).standard_normal(n).astype(dtype)


def run(
    method: Relay, ranks: int, topology: Any, steps: int = 3, order: Any = None, n: int = N, **options: Any
) -> tuple[list[Any], list[list[Any]]]:
    """Return each step's result, and each step's residuals of all ranks."""
    order = order or range(ranks)

    def work(comm: Communicator) -> Any:
        aggregator, results, residuals = method.start(comm, n, **options), [], []
        for step in range(steps):
            results.append(aggregator.aggregate(vector(order[comm.rank], step, n)))
            residuals.append(aggregator.state_dict()["residual"])
        return results, residuals

    found = run_local(ranks, work, topology)
    for results, _ in found:
        np.testing.assert_array_equal(results, found[0][0])
    return found[0][0], [[residuals[step] for _, residuals in found] for step in range(steps)]


def require_conserved(ranks: int, results: list[Any], residuals: list[list[Any]], n: int = N) -> None:
    """Check for every element that M result + sum e(new) = sum (u + e(old)), to the rounding of float32."""
    before = np.zeros((ranks, n))
    for step, (result, after) in enumerate(zip(results, np.asarray(residuals, np.float64), strict=True)):
        given = sum(vector(rank, step, n).astype(np.float64) for rank in range(ranks)) + before.sum(axis=0)
        # each rank rounds its sum, the difference and the decoded value once
        largest = ranks * (np.abs(after).max() + np.abs(result).max() + 5)
        np.testing.assert_allclose(ranks * result.astype(np.float64) + after.sum(axis=0), given, atol=2e-7 * largest)
        before = after


@every_count
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_what_is_not_in_the_result_is_in_the_residuals(levels: int, ranks: int) -> None:
    for topology in topologies(ranks) if levels == 4 else [Ring(), HalvingDoubling()]:
        results, residuals = run(Relay(levels), ranks, topology)
        assert np.any(residuals[-1])
        require_conserved(ranks, results, residuals)


@every_count
def test_short_vectors_lose_nothing_either(levels: int) -> None:
    require_conserved(3, *run(Relay(levels), 3, "auto", n=SHORT), SHORT)


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_any_order_of_the_ranks_conserves_the_same_sum(order: tuple[int, ...]) -> None:
    require_conserved(3, *run(Relay(3), 3, "ring", order=order))


@every_count
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_single_rank_gets_its_vector_exactly(levels: int, dtype: str, comm: Communicator) -> None:
    aggregator = Relay(levels).start(comm, N, dtype=dtype)
    for step in range(2):
        np.testing.assert_array_equal(aggregator.aggregate(vector(0, step, dtype=dtype)), vector(0, step, dtype=dtype))
        assert not aggregator.residual.any()
    state = aggregator.state_dict()
    state["residual"][:] = vector(1)
    aggregator.load_state_dict(state)
    pending = state["residual"].copy()
    kind = pending.dtype
    given = vector(0, dtype=dtype)
    np.testing.assert_array_equal(aggregator.aggregate(given), (given.astype(kind) + pending).astype(dtype))
    assert not aggregator.residual.any()


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_equal_vectors_in_256_levels_differ_little_from_the_mean(ranks: int) -> None:
    """Each of M hops adds half a step of the largest sum at most: together 2 M / 254 of the largest element."""
    for topology in topologies(ranks):
        results, _ = run(Relay(256), ranks, topology, steps=1, order=[0] * ranks)
        errors = np.pad(np.abs(results[0] - vector(0)), (0, -N % 128)).reshape(-1, 128).max(axis=1)
        largest = np.pad(np.abs(vector(0)), (0, -N % 128)).reshape(-1, 128).max(axis=1)
        assert (errors <= 2 * ranks / 254 * largest).all(), topology


def test_error_of_a_ring_exceeds_that_of_plans_whose_sums_are_mostly_small() -> None:
    ranks, exact = 8, np.mean([vector(rank) for rank in range(8)], axis=0, dtype=np.float64)
    error = {
        type(topology).__name__: np.mean((run(Relay(), ranks, topology, steps=1)[0][0] - exact) ** 2)
        for topology in (Ring(), Torus(), HalvingDoubling(), Tree())
    }
    for other in ("Torus", "HalvingDoubling", "Tree"):
        assert error[other] < 0.85 * error["Ring"], error


def test_error_of_owners_stays_as_large_with_more_ranks_and_that_of_a_ring_grows() -> None:
    def relative(method: Any, ranks: int) -> float:
        exact = np.mean([vector(rank) for rank in range(ranks)], axis=0, dtype=np.float64)
        found = run_local(ranks, lambda comm: method.start(comm, N).aggregate(vector(comm.rank)), "ring")[0]
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    (ring, large_ring), (owners, many_owners) = (
        [relative(method, ranks) for ranks in (4, 8)]
        for method in (Relay(), DoubleSqueeze("levels:levels=4,bucket=128"))
    )
    assert many_owners == pytest.approx(owners, rel=0.1)
    assert large_ring > 1.15 * ring
    assert many_owners < 0.9 * large_ring


@pytest.mark.parametrize(
    "other", [Relay(8), Relay(4, 64), Relay(4, coding="entropy"), Relay(4, residual="copy")], ids=str
)
@pytest.mark.parametrize("n", [SHORT, N])
def test_a_rank_with_other_options_is_named_by_all_and_no_residual_changes(other: Relay, n: int) -> None:
    def work(comm: Communicator) -> None:
        aggregator = (other if comm.rank == 1 else Relay()).start(comm, n)
        with pytest.raises(CollectiveMismatch, match="Relay"):
            aggregator.aggregate(vector(comm.rank, n=n))
        assert not np.any(aggregator.residual)

    run_local(3, work, "auto")


def test_a_constant_vector_arrives_in_the_long_run() -> None:
    """Residuals stay bounded, so the mean of many results tends to the vectors' mean."""
    ranks, steps = 4, 60

    def work(comm: Communicator) -> Any:
        aggregator = Relay().start(comm, N)
        total = sum(aggregator.aggregate(vector(comm.rank)).astype(np.float64) for _ in range(steps))
        return total / steps, np.abs(aggregator.residual).max()

    mean = np.mean([vector(rank) for rank in range(ranks)], axis=0, dtype=np.float64)
    for found, largest in run_local(ranks, work, "ring"):
        assert np.abs(found - mean).max() <= largest / steps * 1.001
        assert largest < 60  # 30 to 35 after 60 steps, and no more after 1000


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_short_vectors_under_auto_are_the_mean_of_the_ranks_codes(ranks: int) -> None:
    results, residuals = run(Relay(8, 64), ranks, "auto", steps=1, n=SHORT)
    codes = [in_levels(vector(rank, n=SHORT), 8, 64) for rank in range(ranks)]
    total = codes[0]
    for one in codes[1:]:
        total = total + one
    np.testing.assert_array_equal(results[0], total / np.float32(ranks))
    for rank, left in enumerate(residuals[0]):
        np.testing.assert_array_equal(left, vector(rank, n=SHORT) - codes[rank])


def test_no_tensor_depends_on_the_others() -> None:
    """Compare with vectors of one tensor each, over a star, whose root gets whole vectors."""

    def work(comm: Communicator) -> None:
        together = Relay(3).start(comm, N, tensor_lengths=LENGTHS)
        alone = [Relay(3).start(comm, length) for length in LENGTHS]
        for step in range(2):
            given, start = vector(comm.rank, step), 0
            result = together.aggregate(given)
            for length, one in zip(LENGTHS, alone, strict=True):
                np.testing.assert_array_equal(result[start : start + length], one.aggregate(given[start:][:length]))
                start += -(-length // 64) * 64

    run_local(3, work, Star())


@pytest.mark.parametrize("topology", [Ring(), HalvingDoubling(), Tree(), "auto"], ids=str)
def test_bits_do_not_depend_on_pieces_or_threads(topology: Any) -> None:
    n = 100_003

    def work(comm: Communicator) -> Any:
        aggregator = Relay(3).start(comm, n)
        return [aggregator.aggregate(vector(comm.rank, step, n)) for step in range(2)], aggregator.residual.copy()

    forms: tuple[dict[str, Any], ...] = {}, {"piece_bytes": 512}, {"piece_bytes": 5000, "threads": 2}
    found = [run_local(3, work, topology, **options) for options in forms]
    for others in found[1:]:
        for mine, theirs in zip(found[0], others, strict=True):
            np.testing.assert_equal(mine, theirs)


@every_count
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("topology", ["ring", "star", "halving-doubling", "auto"])
def test_ranks_with_nan_are_named_and_no_residual_changes(levels: int, bad: float, topology: Any) -> None:
    n = SHORT if topology == "auto" else N

    def work(comm: Communicator) -> None:
        aggregator, untried = (Relay(levels).start(comm, n) for _ in range(2))
        for step in range(3):
            spoilt, given = vector(comm.rank, step, n), vector(comm.rank, step, n)
            if comm.rank == step:
                spoilt[[0, n // 2, n - 1][step]] = bad
            before = aggregator.state_dict()
            with pytest.raises(NonFiniteGradient) as caught:
                aggregator.aggregate(spoilt)
            assert caught.value.ranks == (step,)
            np.testing.assert_equal(aggregator.state_dict(), before)
            np.testing.assert_array_equal(aggregator.aggregate(given), untried.aggregate(given))
            np.testing.assert_array_equal(aggregator.residual, untried.residual)

    run_local(3, work, topology)


@pytest.mark.parametrize("topology", ["ring", "auto"])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_sum_that_overflows_is_no_ranks_fault(topology: Any) -> None:
    def work(comm: Communicator) -> None:
        aggregator = Relay().start(comm, SHORT)
        with pytest.raises(NonFiniteGradient) as caught:
            aggregator.aggregate(np.full(SHORT, 3e38, np.float32))
        assert caught.value.ranks == ()
        assert not aggregator.residual.any()

    run_local(2, work, topology)


@pytest.mark.parametrize("topology", ["ring", "auto"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_can_be_taken_back_and_repeated(ranks: int, topology: Any) -> None:
    n = SHORT if topology == "auto" else N

    def work(comm: Communicator) -> None:
        aggregator = Relay(3).start(comm, n)
        aggregator.aggregate(vector(comm.rank, 0, n))
        before, first = aggregator.state_dict(), aggregator.aggregate(vector(comm.rank, 1, n)).copy()
        after = aggregator.state_dict()
        aggregator.undo()
        np.testing.assert_equal(aggregator.state_dict(), before)
        np.testing.assert_array_equal(aggregator.aggregate(vector(comm.rank, 1, n)), first)
        np.testing.assert_equal(aggregator.state_dict(), after)

    run_local(ranks, work, topology)


@pytest.mark.parametrize("topology", ["ring", "star", "auto"])
def test_a_state_is_one_vector_and_moves_to_other_numbers_of_ranks(topology: Any) -> None:
    def states(comm: Communicator) -> Any:
        aggregator = Relay().start(comm, N)
        aggregator.aggregate(vector(comm.rank))
        return aggregator.state_dict(), aggregator.state_kinds

    found = run_local(4, states, topology)
    before, kinds = [state for state, _ in found], found[0][1]
    assert {key for key, value in before[0].items() if isinstance(value, np.ndarray)} == {"residual"}
    assert before[0]["residual"].shape == (N,)
    assert kinds["residual"] == "mean"
    pending = np.mean([state["residual"] for state in before], axis=0, dtype=np.float64)
    for ranks in (1, 3, 6):
        moved = redistribute(before, ranks, kinds)
        np.testing.assert_allclose(np.mean([one["residual"] for one in moved], axis=0), pending, atol=1e-6)

        def resume(comm: Communicator, moved: Any = moved) -> None:
            aggregator = Relay().start(comm, N)
            aggregator.load_state_dict(moved[comm.rank])
            result, left = aggregator.aggregate(vector(comm.rank, 1)), comm.allreduce(aggregator.residual, "mean")
            exact = comm.allreduce(vector(comm.rank, 1), "mean") + pending
            np.testing.assert_allclose(result + left, exact, atol=1e-5)

        run_local(ranks, resume, topology)


@pytest.mark.parametrize("topology", ["ring", "star", "auto"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_caller_that_adds_what_is_left_out_gets_the_bits_of_a_kept_residual(ranks: int, topology: Any) -> None:
    # not so short that "auto" gathers codes, which it never does with residuals in the copy
    n = 70_003

    def work(comm: Communicator) -> None:
        kept, left = (Relay(2, residual=where).start(comm, n) for where in ("own", "copy"))
        pending = np.zeros(n, np.float32)
        for step in range(3):
            given = vector(comm.rank, step, n)
            np.testing.assert_array_equal(kept.aggregate(given), left.aggregate(given + pending))
            pending[:] = left.residual
            np.testing.assert_array_equal(kept.residual, pending)
        assert "residual" not in left.state_dict()

    run_local(ranks, work, topology)


def test_a_residual_in_the_copy_is_of_the_last_step_that_succeeded() -> None:
    def work(comm: Communicator) -> None:
        aggregator, untried = (Relay(3, residual="copy").start(comm, N) for _ in range(2))
        given, spoilt = vector(comm.rank), np.full(N, np.nan if comm.rank == 1 else 1, np.float32)
        with pytest.raises(NonFiniteGradient) as caught:
            aggregator.aggregate(spoilt)
        assert caught.value.ranks == (1,)
        np.testing.assert_array_equal(aggregator.aggregate(given), untried.aggregate(given))
        np.testing.assert_array_equal(aggregator.residual, untried.residual)

    run_local(3, work, "ring")


@pytest.mark.parametrize("wrapper", [PerNode, Auto])
def test_wrappers_do_not_see_the_copy_of_the_model(wrapper: Any) -> None:
    with pytest.raises(ValueError, match=r"leaves its residual in the copy of the model.*pass residual='own'"):
        wrapper(Relay(residual="copy"))


def test_gradients_have_more_levels_unless_the_user_says_otherwise() -> None:
    assert Relay().levels == 4
    assert Relay().of_gradients() == Relay(16)
    assert Relay(bucket=64).of_gradients() == Relay(16, bucket=64)
    assert Relay(4).of_gradients() == Relay(4)
    assert PerNode(Relay()).of_gradients() == PerNode(Relay(16))
    with pytest.raises(ValueError, match="gradients have no copy of the model"):
        Relay(residual="copy").of_gradients()


@every_count
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_hop_around_a_ring_sends_the_codes_bits(levels: int, ranks: int) -> None:
    n, bucket = 128 * 512, 128
    bits = {2: 1, 3: 8 * 26 / 128, 4: 2, 8: 3, 16: 4, 256: 8}[levels] + 16 / bucket

    def work(comm: Communicator) -> int:
        aggregator = Relay(levels, bucket).start(comm, n)
        aggregator.aggregate(vector(comm.rank, n=n))
        return aggregator.traffic.last.bytes_sent

    for sent in run_local(ranks, work, "ring"):
        expected = 2 * (ranks - 1) / ranks * n * bits / 8
        assert 0 <= sent - expected <= 100  # the check of the call


def test_entropy_coding_is_refused_on_devices(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"Relay.*encode"):
        Relay(coding="entropy").start(comm, N, device="cuda")


def test_a_vector_without_elements_takes_part() -> None:
    for topology in ("ring", "auto"):
        run_local(3, lambda comm: Relay().start(comm, 0).aggregate(np.empty(0, np.float32)), topology)


@pytest.mark.parametrize("residual", ["own", "copy"])
def test_gaps_between_tensors_of_float64_gather_nothing(residual: Any) -> None:
    values = np.ones(133)
    values[10:64] = 7  # which no tensor has

    def work(comm: Communicator) -> Any:
        aggregator = Relay(residual=residual).start(comm, 133, dtype="float64", tensor_lengths=(10, 64, 5))
        for _ in range(3):
            aggregator.aggregate(values)
        assert aggregator.residual is not None
        return aggregator.residual[10:64].tolist()

    assert run_local(2, work, "ring") == [[0.0] * 54] * 2


@pytest.mark.parametrize(
    ("ranks", "route"), [(8, HalvingDoubling()), (12, Torus()), (11, DoubleTree()), (16, HalvingDoubling())]
)
def test_many_ranks_take_the_route_whose_errors_grow_least(ranks: int, route: Any) -> None:
    assert quiet_route(ranks) == route


def test_auto_takes_that_route_where_vectors_are_too_long_to_be_gathered() -> None:
    n = MOST_GATHERED + 1
    found, quiet, ring = (run(Relay(), 8, topology, 1, n=n)[0][0] for topology in ("auto", HalvingDoubling(), Ring()))
    np.testing.assert_array_equal(found, quiet)
    assert np.any(found != ring)
