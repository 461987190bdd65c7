"""PerNode on ranks that are threads: means of nodes, the method's own bits between nodes, errors and states."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatch, TopologyError
from mpicomp import (
    QSGD,
    SSDM,
    Auto,
    Communicator,
    Dense,
    EFSignSGD,
    LocalTopK,
    Marsit,
    NonFiniteGradient,
    PerNode,
    PowerSGD,
    Relay,
    ScaleCom,
    SparseLoCo,
    redistribute,
    run_local,
)
from mpicomp.aggregator.spec import VectorSpec
from mpicomp.nodes.shards import cut, shard_spec, tensor_parts
from tests.exact import gradient
from tests.methods import METHODS

N = 3 * 32_768 + 900
LENGTHS = (700, 32_768 + 5, N - 704 - 32_832)
STEPS = 4
LAYOUTS = {"2x2": (4, 2), "3x2": (6, 2), "2+1": (3, 2), "2+2+1": (5, 2), "1x3": (3, 3)}

every_way = pytest.mark.parametrize("local", ["shared", "ring"])


def vector(rank: int, step: int, dtype: str = "float32") -> Any:
    return gradient(rank, step, N, dtype, LENGTHS)


def per_node(method: Any, ranks: int, per: int, local: Any = "auto", dtype: str = "float32", steps: int = STEPS) -> Any:
    """Return each rank's results, state and kinds of its entries."""

    def work(comm: Communicator) -> Any:
        aggregator = PerNode(method, local).start(comm, N, dtype=dtype, tensor_lengths=LENGTHS, vector_id=3)
        results = [aggregator.aggregate(vector(comm.rank, step, dtype)) for step in range(steps)]
        return results, aggregator.state_dict(), aggregator.state_kinds

    return run_local(ranks, work, ranks_per_node=per)


@pytest.mark.parametrize("name", METHODS)
def test_between_nodes_a_shard_has_the_bits_of_the_method_on_sums_of_nodes(name: str) -> None:
    """The sums of nodes are made here, and given to the method on as many ranks as there are nodes."""
    method = METHODS[name]
    if isinstance(method, Auto) or getattr(method, "rates", None) is not None:
        pytest.skip("measures time, or has rates by position")
    ranks, per, nodes = 4, 2, 2
    spec = VectorSpec(N, "float32", 3, LENGTHS if method.uses_tensor_lengths else None)
    shards = cut(spec, per, method.shard_alignment(N, "float32"))
    found = per_node(method, ranks, per)
    for number, shard in enumerate(shards):
        own = shard_spec(spec, shard, number, per, keeps_shapes=True)

        def between(comm: Communicator, shard: range = shard, own: VectorSpec = own) -> Any:
            lengths = {"tensor_lengths": own.tensor_lengths} if own.n else {}
            aggregator = method.start(comm, own.n, vector_id=own.vector_id, **lengths)
            results = []
            for step in range(STEPS):
                first, second = (vector(2 * comm.rank + one, step)[shard.start : shard.stop] for one in range(2))
                results.append(aggregator.aggregate((first + second) / np.float32(per)))
            return results, aggregator.state_dict()

        for node, (results, state) in enumerate(run_local(nodes, between)):
            here, kept, _ = found[per * node + number]
            for one, other in zip(here, results, strict=True):
                np.testing.assert_array_equal(one[shard.start : shard.stop], other)
            for key in state.keys() - {"method", "n", "step"}:
                np.testing.assert_array_equal(kept[key], state[key], err_msg=key)


@pytest.mark.parametrize("name", METHODS)
def test_one_rank_a_node_is_the_method_itself(name: str) -> None:
    method = METHODS[name]
    if isinstance(method, Auto) or getattr(method, "rates", None) is not None:
        pytest.skip("measures time, or has rates by position")

    def work(comm: Communicator, method: Any) -> Any:
        aggregator = method.start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        return [aggregator.aggregate(vector(comm.rank, step)) for step in range(STEPS)]

    plain = run_local(3, lambda comm: work(comm, method))
    wrapped = run_local(3, lambda comm: work(comm, PerNode(method)), ranks_per_node=1)
    np.testing.assert_array_equal(plain, wrapped)


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("method", [Dense(), Marsit(None), Relay(), QSGD(), ScaleCom()], ids=str)
def test_bytes_that_leave_a_node_are_the_methods_whatever_its_ranks(method: Any, nodes: int) -> None:
    n = 12 * 32_768  # of which the check of a call is little

    def sent(comm: Communicator) -> int:
        aggregator = PerNode(method, "shared").start(comm, n)
        aggregator.aggregate(gradient(comm.rank, 0, n, "float32", (n,)))
        return aggregator.traffic.last.bytes_sent

    leaving = [sum(run_local(nodes * per, sent, "ring", ranks_per_node=per)[:per]) for per in (1, 2, 4)]
    assert leaving[0] > 0
    assert leaving[1:] == pytest.approx([leaving[0]] * 2, rel=0.03)


@every_way
@pytest.mark.parametrize("method", [Dense(), QSGD(), Marsit(None)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_one_node_is_the_mean_in_the_order_of_ranks(method: Any, dtype: str, local: str) -> None:
    found = per_node(method, 3, 3, local, dtype)
    for step in range(STEPS):
        wide = [vector(rank, step, dtype).astype(np.float32 if dtype == "float16" else dtype) for rank in range(3)]
        mean = ((wide[0] + wide[1]) + wide[2]) / wide[0].dtype.type(3)
        for results, state, _ in found:
            np.testing.assert_array_equal(results[step], mean.astype(dtype))
            assert state["step"] == STEPS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_of_any_size_average_over_ranks_alike_by_messages_and_shared_memory(layout: str) -> None:
    ranks, per = LAYOUTS[layout]
    shared, ring = (per_node(Dense(), ranks, per, local) for local in ("shared", "ring"))
    for step in range(STEPS):
        mean = np.mean([vector(rank, step).astype(np.float64) for rank in range(ranks)], axis=0)
        for one, other in zip(shared, ring, strict=True):
            np.testing.assert_array_equal(one[0][step], shared[0][0][step])
            np.testing.assert_array_equal(one[0][step], other[0][step])
        np.testing.assert_allclose(shared[0][0][step], mean, rtol=0, atol=3e-6)


@pytest.mark.parametrize("layout", ["2x2", "2+2+1"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("method", [LocalTopK(50), EFSignSGD(), Marsit(None)], ids=str)
def test_all_ranks_get_the_same_bits(method: Any, dtype: str, layout: str) -> None:
    found = per_node(method, *LAYOUTS[layout], "auto", dtype)
    assert all(np.array_equal(found[0][0][step], one[0][step]) for one in found for step in range(STEPS))


@pytest.mark.parametrize("layout", ["2x2", "2+2+1"])
def test_results_and_residuals_of_a_shard_sum_up_to_the_means(layout: str) -> None:
    ranks, per = LAYOUTS[layout]
    found = per_node(LocalTopK(50), ranks, per)
    total = np.sum([vector(rank, step).astype(np.float64) for rank in range(ranks) for step in range(STEPS)], axis=0)
    pending, nodes = np.zeros(N), -(-ranks // per)
    for _, state, _ in found:
        start, stop = state["shard"]
        pending[start:stop] += state["residual"] / nodes
    np.testing.assert_allclose(np.sum(found[0][0], axis=0, dtype=np.float64) + pending, total / ranks, atol=2e-5)


@pytest.mark.parametrize("name", METHODS)
def test_tensors_may_leave_a_rank_without_a_shard(name: str) -> None:
    lengths = (4, 32, 8, 512)

    def rank(comm: Communicator) -> Any:
        aggregator = PerNode(METHODS[name]).start(comm, 704, tensor_lengths=lengths)
        for _ in range(2):
            mean = aggregator.aggregate(np.ones(704, np.float32))
        return mean

    first, *others = run_local(5, rank, ranks_per_node=2)
    assert np.isfinite(first).all()
    assert all(one.tobytes() == first.tobytes() for one in others)


def test_a_rank_keeps_the_residual_of_its_shard_alone() -> None:
    found = per_node(LocalTopK(50), 4, 2)
    lengths = [state["residual"].size for _, state, _ in found]
    assert lengths[0] == lengths[2]
    assert lengths[1] == lengths[3]
    assert lengths[0] + lengths[1] == N
    assert abs(lengths[0] - lengths[1]) <= 1600 + 64  # the method's alignment


# Errors ---------------------------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("method", [Dense(), LocalTopK(50), EFSignSGD(), SparseLoCo()], ids=str)
def test_all_ranks_are_told_which_of_them_has_nan_and_lose_nothing(method: Any, local: str) -> None:
    def work(comm: Communicator) -> Any:
        aggregator = PerNode(method, local).start(comm, N)
        results = [aggregator.aggregate(vector(comm.rank, 0))]
        bad = np.array(vector(comm.rank, 1))
        if comm.rank == 2:
            bad[-1] = np.nan  # in the last shard
        before = aggregator.state_dict()
        for _ in range(2):
            with pytest.raises(NonFiniteGradient, match="from rank 2;") as caught:
                aggregator.aggregate(bad)
            assert caught.value.ranks == (2,)
        after = aggregator.state_dict()
        assert all(np.array_equal(after[key], one) for key, one in before.items())
        return [*results, aggregator.aggregate(vector(comm.rank, 1))]

    found = run_local(4, work, ranks_per_node=2)
    np.testing.assert_array_equal(found[0], per_node_of(method, 2))
    assert all(np.array_equal(found[0], one) for one in found)


def per_node_of(method: Any, steps: int) -> Any:
    def work(comm: Communicator) -> Any:
        aggregator = PerNode(method).start(comm, N)
        return [aggregator.aggregate(vector(comm.rank, step)) for step in range(steps)]

    return run_local(4, work, ranks_per_node=2)[0]


@pytest.mark.parametrize("per", [2, 4])
def test_a_method_that_skips_nan_returns_zeros_on_all_ranks(per: int) -> None:
    def work(comm: Communicator) -> Any:
        aggregator = PerNode(Marsit(None, nonfinite="skip")).start(comm, N)
        bad = np.array(vector(comm.rank, 0))
        bad[0] = np.inf if comm.rank == 3 else 1
        skipped = aggregator.aggregate(bad)
        return skipped, aggregator.aggregate(vector(comm.rank, 1))

    for skipped, made in run_local(4, work, ranks_per_node=per):
        assert not skipped.any()
        assert made.any()


def test_a_sum_that_overflows_on_one_shard_fails_on_all_ranks() -> None:
    def work(comm: Communicator) -> None:
        aggregator = PerNode(Dense()).start(comm, N)
        large = np.zeros(N, np.float32)
        large[0] = 3e38
        with pytest.raises(NonFiniteGradient, match="overflowed") as caught:
            aggregator.aggregate(large)
        assert caught.value.ranks == ()
        np.testing.assert_array_equal(aggregator.aggregate(vector(0, 0)), vector(0, 0))

    run_local(4, work, ranks_per_node=2)


def test_ranks_without_shared_memory_send_messages_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = per_node(LocalTopK(50), 4, 2, "ring")[0][0]

    def fail(*arguments: object) -> None:
        raise MemoryError("No space left on device")

    monkeypatch.setattr("mpicomp.nodes.shared_memory_sum.share_memory", fail)
    with caplog.at_level(logging.WARNING, "mpicomp"):
        found = per_node(LocalTopK(50), 4, 2)
    np.testing.assert_array_equal(found[3][0], expected)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 4
    assert "No space left on device" in texts[0]
    assert "local='ring'" in texts[0]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: PerNode(3), "algorithm must be a method such as"),
        (lambda: PerNode("marsitt"), "there is no algorithm 'marsitt' .did you mean 'marsit'"),
        (lambda: PerNode(PerNode(Dense())), "algorithm must be a method such as"),
        (lambda: PerNode(Dense(), local="mpi"), "local must be"),
        (lambda: PerNode(ScaleCom(rates=((10, 20),))), "rates by position"),
        (lambda: Auto(PerNode(Marsit())), r"write PerNode\(Auto\(...\)\)"),
    ],
)
def test_options_that_cannot_be_used_are_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_topology_that_does_not_fit_the_nodes_is_an_error_on_all_ranks() -> None:
    from collectives import Torus

    def work(comm: Communicator) -> None:
        with pytest.raises(TopologyError, match="pass another topology"):
            PerNode(Dense()).start(comm, N)

    run_local(4, work, Torus(2, 2), ranks_per_node=2)


# States ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["2x2", "2+2+1", "1x3"])
@pytest.mark.parametrize("method", [Marsit(3), SparseLoCo(), PowerSGD(start_step=1)], ids=str)
def test_a_run_goes_on_to_the_bit_from_states_of_its_ranks(method: Any, layout: str) -> None:
    ranks, per = LAYOUTS[layout]
    whole, half = per_node(method, ranks, per), per_node(method, ranks, per, steps=2)

    def work(comm: Communicator) -> Any:
        aggregator = PerNode(method).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        aggregator.load_state_dict(half[comm.rank][1])
        return [aggregator.aggregate(vector(comm.rank, step)) for step in range(2, STEPS)]

    for found, (expected, _, _) in zip(run_local(ranks, work, ranks_per_node=per), whole, strict=True):
        np.testing.assert_array_equal(found, expected[2:])


@pytest.mark.parametrize("method", [Marsit(None), EFSignSGD(), LocalTopK(50), PowerSGD(start_step=1)], ids=str)
@pytest.mark.parametrize("to", ["2x2", "3x2", "2+1", "1x3", "2x1"])
def test_other_nodes_go_on_with_all_pending_errors(method: Any, to: str) -> None:
    kinds, states = (per_node(method, 4, 2, steps=2)[0][2]), [one[1] for one in per_node(method, 4, 2, steps=2)]
    ranks, per = {**LAYOUTS, "2x1": (2, 1)}[to]
    moved = redistribute(states, ranks, kinds)

    def work(comm: Communicator) -> Any:
        aggregator = PerNode(method).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        aggregator.load_state_dict(moved[comm.rank])
        state = aggregator.state_dict()
        return state, aggregator.aggregate(np.zeros(N, np.float32)), aggregator.state_dict()

    found = run_local(ranks, work, ranks_per_node=per)
    np.testing.assert_allclose(pending([one[0] for one in found]), pending(states), atol=1e-6)
    for state, _, _ in found:
        assert state["step"] == 2
    # a single node averages in full precision: its first mean has all of the pending errors
    if to == "1x3":
        np.testing.assert_allclose(found[0][1], pending(states), atol=1e-6)
        assert not any(one[2]["residual"].any() for one in found)


def pending(states: Any) -> Any:
    """Return the mean over nodes of each element's residual."""
    total, count = np.zeros(N), np.zeros(N)
    for state in states:
        start, stop = state["shard"]
        total[start:stop] += state["residual"]
        count[start:stop] += 1
    return total / count


def test_scales_of_tensors_move_to_other_shards() -> None:
    states = [one[1] for one in per_node(Marsit(None), 4, 2, steps=2)]
    kinds = {"method": "shared", "n": "shared", "step": "shared", "shard": "shard"}
    kinds |= {"gamma": "shared", "magnitudes": "shared", "residual": "mean"}
    moved = redistribute(states, 3, kinds)
    assert moved[0]["shard"].tolist() == [0, int(states[0]["shard"][1]), N]

    def load(comm: Communicator) -> Any:
        aggregator = PerNode(Marsit(None)).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        aggregator.load_state_dict(moved[comm.rank])
        return aggregator.state_dict()["magnitudes"]

    spec = VectorSpec(N, "float32", 3, LENGTHS)
    expected = np.zeros(3)
    counts = np.zeros(3)
    for number in range(2):
        shard = range(*(int(one) for one in states[number]["shard"]))
        for (tensor, count), value in zip(tensor_parts(spec, shard), states[number]["magnitudes"], strict=True):
            expected[tensor] += count * value
            counts[tensor] += count
    for magnitudes in run_local(3, load, ranks_per_node=1):
        np.testing.assert_allclose(magnitudes, expected / counts, rtol=1e-6)


def test_a_state_of_another_shard_is_refused_with_the_cure() -> None:
    states = [one[1] for one in per_node(LocalTopK(50), 4, 2, steps=1)]

    def work(comm: Communicator) -> None:
        aggregator = PerNode(LocalTopK(50)).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        with pytest.raises(ValueError, match=r"this rank owns .*: another number of nodes.*mpicomp.redistribute"):
            aggregator.load_state_dict(states[comm.rank ^ 1])

    run_local(4, work, ranks_per_node=2)
    with pytest.raises(ValueError, match="do not make up their"):
        redistribute(states[:1], 2, per_node(LocalTopK(50), 4, 2, steps=1)[0][2])


@pytest.mark.parametrize("bounds", [[5, 3], [0.0, 9.0], [0], 7, [[0, 9]], "ab", None], ids=str)
def test_damaged_bounds_of_a_state_are_refused(bounds: Any) -> None:
    def work(comm: Communicator) -> None:
        aggregator = PerNode(LocalTopK(50)).start(comm, N)
        state = {**aggregator.state_dict(), "shard": bounds if isinstance(bounds, str) else np.array(bounds)}
        with pytest.raises(ValueError, match=r"this state's shard is .*, not bounds: take an earlier one"):
            aggregator.load_state_dict(state)

    run_local(2, work, ranks_per_node=2)


def test_a_damaged_residual_of_all_shards_is_refused() -> None:
    found = per_node(LocalTopK(50), 4, 2, steps=1)
    moved = redistribute([one[1] for one in found], 6, found[0][2])
    moved = [{**state, "residual": state["residual"][:-1]} for state in moved]

    def work(comm: Communicator) -> None:
        aggregator = PerNode(LocalTopK(50)).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        with pytest.raises(ValueError, match="this state's residual has shape"):
            aggregator.load_state_dict(moved[comm.rank])

    run_local(6, work, ranks_per_node=2)


@pytest.mark.parametrize("name", METHODS)
def test_states_of_all_methods_move_between_all_layouts_of_nodes(name: str) -> None:
    method, n, lengths = METHODS[name], 5000, (700, 3000, 5000 - 704 - 3008)
    if getattr(method, "rates", None) is not None:
        pytest.skip("has rates by position")
    layouts = {"1+1": (2, 1), "2+2": (4, 2), "2+1": (3, 2), "3": (3, 3)}

    def train(comm: Communicator, states: Any = None) -> Any:
        aggregator = PerNode(method).start(comm, n, tensor_lengths=lengths)
        if states is not None:
            aggregator.load_state_dict(states[comm.rank])
        result = aggregator.aggregate(gradient(comm.rank, aggregator.step, n, lengths=lengths))
        return result, aggregator.state_dict(), aggregator.state_kinds

    for ranks, per in layouts.values():
        _, states, kinds = zip(*run_local(ranks, train, ranks_per_node=per), strict=True)
        for others, per_other in layouts.values():
            moved = redistribute(states, others, kinds[0])
            results, *_ = zip(
                *run_local(others, lambda comm, to=moved: train(comm, to), ranks_per_node=per_other), strict=True
            )
            assert all(np.array_equal(one, results[0]) for one in results)


def test_states_of_empty_vectors_move_to_other_nodes() -> None:
    def work(comm: Communicator, states: Any = None) -> Any:
        aggregator = PerNode(LocalTopK(50)).start(comm, 0)
        if states is not None:
            aggregator.load_state_dict(states[comm.rank])
        assert not aggregator.aggregate(np.empty(0, np.float32)).size
        return aggregator.state_dict(), aggregator.state_kinds

    states, kinds = zip(*run_local(4, work, ranks_per_node=2), strict=True)
    moved = redistribute(states, 3, kinds[0])
    assert run_local(3, lambda comm: work(comm, moved), ranks_per_node=2)[0][0]["step"] == 2


@pytest.mark.parametrize("method", [Marsit(None, nonfinite="skip"), LocalTopK(50)], ids=str)
def test_a_single_node_keeps_pending_errors_over_steps_that_are_skipped_or_fail(method: Any) -> None:
    found = per_node(method, 4, 2, steps=2)
    states = [one[1] for one in found]
    moved = redistribute(states, 2, found[0][2])

    def work(comm: Communicator) -> Any:
        aggregator = PerNode(method).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        aggregator.load_state_dict(moved[comm.rank])
        with suppress(NonFiniteGradient):
            aggregator.aggregate(np.full(N, np.nan, np.float32))
        mean = aggregator.aggregate(np.zeros(N, np.float32))
        assert not aggregator.can_undo  # as the errors are gone from the state
        aggregator.aggregate(np.zeros(N, np.float32))
        assert aggregator.can_undo
        return mean

    for mean in run_local(2, work, ranks_per_node=2):
        np.testing.assert_allclose(mean, pending(states), atol=1e-6)


def test_momentum_is_no_pending_error_of_a_single_node() -> None:
    method = PerNode(SSDM(momentum=0.9, scale="norm"))

    def train(comm: Communicator) -> Any:
        aggregator = method.start(comm, 1000)
        aggregator.aggregate(gradient(comm.rank, 0, 1000))
        return aggregator.state_dict(), aggregator.state_kinds

    states, kinds = zip(*run_local(4, train, ranks_per_node=2), strict=True)

    def resume(comm: Communicator) -> Any:
        aggregator = method.start(comm, 1000)
        aggregator.load_state_dict(redistribute(states, comm.size, kinds[0])[comm.rank])
        return aggregator.aggregate(gradient(comm.rank, 1, 1000))

    mean = (gradient(0, 1, 1000) + gradient(1, 1, 1000)) / 2
    for found in run_local(2, resume, ranks_per_node=2):
        np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-6)


def test_owners_of_a_shard_that_load_different_scales_are_told() -> None:
    states = [one[1] for one in per_node(Marsit(None), 4, 2, steps=2)]
    states[2] = {**states[2], "magnitudes": states[2]["magnitudes"] * 2}

    def work(comm: Communicator) -> None:
        aggregator = PerNode(Marsit(None)).start(comm, N, tensor_lengths=LENGTHS, vector_id=3)
        aggregator.load_state_dict(states[comm.rank])
        with pytest.raises(CollectiveMismatch, match="ranks 0 and 2, which own one shard, have loaded states"):
            aggregator.aggregate(vector(comm.rank, 2))

    run_local(4, work, ranks_per_node=2)
