"""Errors that owners of elements keep find their new owners, or are not taken over at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Star
from mpicomp import Communicator, DoubleSqueeze, MemSGD, load_state, redistribute, run_local, save_state

N = 6001
METHOD = DoubleSqueeze("one-bit:bucket=64")
KINDS = run_local(1, lambda comm: METHOD.start(comm, N).state_kinds)[0]
State = dict[str, Any]


def vectors(rank: int, steps: int = 2, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((rank, seed)).standard_normal((steps, N)).astype(np.float32)


def states_of(ranks: int, topology: Any, before: list[State] | None = None, steps: int = 2) -> list[State]:
    """All ranks' states after steps over a topology, begun from others' states."""

    def work(comm: Communicator) -> State:
        aggregator = METHOD.start(comm, N)
        if before is not None:
            aggregator.load_state_dict(before[comm.rank])
        for vector in vectors(comm.rank, steps):
            aggregator.aggregate(vector)
        return aggregator.state_dict()

    return run_local(ranks, work, topology)


def without_range(states: list[State]) -> list[State]:
    """As an earlier version made them."""
    return [{key: value for key, value in state.items() if key != "owned"} for state in states]


def owners_errors(states: list[State]) -> NDArray[Any]:
    """The errors of all owners; every element is kept by one rank at most."""
    kept = np.array([state["owner_error"] for state in states])
    assert (np.count_nonzero(kept, axis=0) <= 1).all()
    return kept.sum(axis=0)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_owners_errors_go_from_ring_to_star_and_back(ranks: int, earlier: bool) -> None:
    states = states_of(ranks, "ring")
    if ranks == 1:  # an owner that hears of itself alone has no error with this codec
        states[0]["owner_error"][:] = vectors(0)[0]
    first = owners_errors(states)
    assert np.count_nonzero(first) == N
    if earlier:
        states = without_range(states)
    for topology in (Star(root=ranks - 1), "ring", Star(), "ring"):
        states = states_of(ranks, topology, redistribute(states, ranks, KINDS), steps=0)
        np.testing.assert_array_equal(owners_errors(states), first)
        start = sum(stop - start for start, stop in (state["owned"] for state in states))
        assert start == N


@pytest.mark.parametrize(("old", "new"), [("ring", "star"), ("star", "ring")])
def test_training_that_moves_loses_nothing(old: str, new: str) -> None:
    """Given less received is pending: with the ranks' errors and the owners'."""
    before = states_of(3, old)
    after = redistribute(before, 3, KINDS)

    def go_on(comm: Communicator) -> tuple[NDArray[Any], State]:
        aggregator = METHOD.start(comm, N)
        aggregator.load_state_dict(after[comm.rank])
        received = sum(aggregator.aggregate(vector).astype(np.float64) for vector in vectors(comm.rank, 5, 1))
        return np.asarray(received), aggregator.state_dict()

    found = run_local(3, go_on, new)
    given = np.mean([vectors(rank, 5, 1).astype(np.float64).sum(axis=0) for rank in range(3)], axis=0)

    def pending(states: list[State]) -> NDArray[Any]:
        return np.asarray(np.mean([state["worker_error"].astype(np.float64) for state in states], axis=0)) + (
            owners_errors(states)
        )

    left = pending(before) + given - found[0][0]
    np.testing.assert_allclose(pending([state for _, state in found]), left, atol=1e-4)
    assert np.abs(left).max() > 0.1


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("old", "new"), [("ring", "star"), ("star", "ring"), ("star", Star(root=1)), ("ring", Star(root=1))]
)
def test_a_rank_whose_owned_elements_changed_takes_no_state_of_its_own(ranks: int, old: Any, new: Any) -> None:
    states = states_of(ranks, old)

    def work(comm: Communicator) -> bool:
        aggregator = METHOD.start(comm, N)
        owned = aggregator.state_dict()["owned"].tolist()
        if owned == states[comm.rank]["owned"].tolist():
            aggregator.load_state_dict(states[comm.rank])
            return False
        before = aggregator.state_dict()
        with pytest.raises(ValueError, match=rf"^rank {comm.rank} of {ranks}, .*mpicomp.redistribute") as caught:
            aggregator.load_state_dict(states[comm.rank])
        assert str(caught.value).isprintable()
        with pytest.raises(ValueError, match=r"mpicomp.redistribute"):
            aggregator.check_state_dict(states[comm.rank])
        assert str(aggregator.state_dict()) == str(before)
        return True

    refused = run_local(ranks, work, new)
    # no rank's elements are the same but a star's that owns nothing in both
    assert sum(refused) == (2 if old == "star" and isinstance(new, Star) else ranks)


def test_a_state_of_another_number_of_ranks_is_refused() -> None:
    states = states_of(4, "ring")

    def work(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"was taken by the owner of elements \d+ to \d+, and this rank owns"):
            METHOD.start(comm, N).load_state_dict(states[comm.rank])

    run_local(3, work, "ring")


@pytest.mark.parametrize(
    ("old", "new", "refusing"), [("ring", "star", [1, 2]), ("star", "ring", [0]), (Star(root=2), "ring", [2])]
)
def test_states_of_earlier_versions_load_where_nothing_is_lost(old: Any, new: str, refusing: list[int]) -> None:
    states = without_range(states_of(3, old))

    def same(comm: Communicator) -> None:
        aggregator = METHOD.start(comm, N)
        aggregator.load_state_dict(states[comm.rank])
        np.testing.assert_array_equal(aggregator.state_dict()["owner_error"], states[comm.rank]["owner_error"])

    run_local(3, same, old)

    def other(comm: Communicator) -> None:
        aggregator = METHOD.start(comm, N)
        if comm.rank not in refusing:
            aggregator.load_state_dict(states[comm.rank])
            return
        with pytest.raises(ValueError, match=r"has elements that this rank does not own .*mpicomp.redistribute"):
            aggregator.load_state_dict(states[comm.rank])

    run_local(3, other, new)


def test_states_of_some_ranks_alone_or_of_two_runs_are_told() -> None:
    states = states_of(3, "ring")
    for wrong in (states[:2], [*states, states[0]], [states[0], states[0], states[2]]):
        with pytest.raises(ValueError, match=r"parts of owner_error .* do not make up its 6001 elements"):
            redistribute(wrong, 3, KINDS)
    for owned in (None, [0], [0.0, 1.0], "text"):
        with pytest.raises(ValueError, match=r"rank 1 has owned .*, not a range"):
            redistribute([states[0], states[1] | {"owned": owned}, states[2]], 3, KINDS)


def test_states_that_were_merged_can_be_merged_again(tmp_path: Path) -> None:
    merged = redistribute(states_of(3, "ring"), 5, KINDS)
    for rank, state in enumerate(merged):
        save_state(tmp_path / f"{rank}", state)
    again = redistribute([load_state(tmp_path / f"{rank}") for rank in range(5)], 2, KINDS)
    assert str(again[0]) == str(again[1]) == str(merged[0])
    np.testing.assert_array_equal(again[0]["owner_error"], merged[0]["owner_error"])
    assert np.count_nonzero(again[0]["owner_error"]) == N
    changed = merged[1] | {"owner_error": merged[1]["owner_error"] + 1}
    with pytest.raises(ValueError, match="ranks 0 and 1 differ in owner_error"):
        redistribute([merged[0], changed], 2, KINDS)


def test_a_method_whose_owners_keep_nothing_moves_freely() -> None:
    method = MemSGD("one-bit:bucket=64")
    states: list[State] = []
    for topology in ("ring", "star", "ring"):
        before = redistribute(states, 3, KINDS) if topology == "ring" and states else states

        def work(comm: Communicator, before: list[State] = before) -> State:
            aggregator = method.start(comm, N)
            if before:
                aggregator.load_state_dict(before[comm.rank])
            aggregator.aggregate(vectors(comm.rank)[0])
            return aggregator.state_dict()

        states = run_local(3, work, topology)
        assert "owned" not in states[0]
    assert states[0]["step"] == 3
