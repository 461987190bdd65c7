"""Split learning on real ranks: the weights of one process for any placement of clients, and errors on both ends."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import CollectiveTimeout, Communicator
from mpicomp.codecs.rows import FullRows, RowQuantizer, TopRows
from mpicomp.pipeline import Deltas, Direct, PipelineError, SplitClient, SplitServer
from tests.mpi.pipeline.split_parties import (
    CLIENTS,
    EXAMPLES,
    FIRST,
    LAST,
    MIDDLE,
    WIDTH,
    Layer,
    Party,
    batches,
    data,
    fail,
    in_turn,
    layers,
    made,
    one_step,
    optimizer,
    prediction,
    train_turn,
    visits,
)
from tests.mpi.pipeline.stages import fail_store

pytestmark = pytest.mark.mpi(min_size=2, max_size=3)


def test_weights_are_those_of_one_process_after_all_clients_turns(comm: Communicator) -> None:
    party, whole = made(comm), nn.Sequential(Layer(FIRST), Layer(MIDDLE), Layer(LAST))
    steps = optimizer(whole)
    for client in (0, 1, 2, 0):
        losses, expected = train_turn(party, client), []
        inputs, targets = data(client)
        for ids in batches():
            loss = nn.functional.mse_loss(whole(inputs[ids]), targets[ids])
            loss.backward()
            expected.append(loss.item())
            steps.step()
            steps.zero_grad()
        assert losses == (expected if isinstance(party, SplitClient) and party.has(client) else [])
    same = [whole[MIDDLE]] if comm.rank == 0 else [whole[FIRST], whole[LAST]]
    for mine, theirs in zip(layers(party), same, strict=True):
        if in_turn(party):
            assert all(torch.equal(one, mine.state_dict()[name]) for name, one in theirs.state_dict().items())
            assert mine.seen == 8


def test_clients_may_have_layers_without_weights(comm: Communicator) -> None:
    party: Party
    if comm.rank == 0:
        party = SplitServer(Layer(MIDDLE), comm, CLIENTS)
    else:
        party = SplitClient(nn.Identity(), nn.Identity(), comm, CLIENTS, loss=nn.functional.mse_loss)
    middle = Layer(MIDDLE)
    for client in range(CLIENTS):
        loss = one_step(party, client)
        inputs, targets = data(client)
        expected = nn.functional.mse_loss(middle(inputs), targets).item()
        assert loss == (expected if isinstance(party, SplitClient) and party.has(client) else None)


@pytest.mark.parametrize("codec", [RowQuantizer(2), RowQuantizer(4, "stochastic"), FullRows("float16")], ids=str)
def test_both_ends_of_all_cuts_keep_the_same_messages(comm: Communicator, codec: Any) -> None:
    party = made(comm, forward=Deltas(codec, EXAMPLES, check_every=2), backward=Direct(TopRows(0.2, RowQuantizer(8))))
    losses = [loss for _ in range(8) for client in range(CLIENTS) for loss in train_turn(party, client)]
    if isinstance(party, SplitClient):
        assert sum(losses[-2:]) < sum(losses[:2])
    held: dict[tuple[int, int], list[Any]] = {}
    for state in comm.allgather_object(party.state_dict()):
        for client, both in state["cuts"].items():
            for cut in range(2):
                held.setdefault((client, cut), []).append(both[cut]["activations"]["store"])
    assert len(held) == 2 * CLIENTS
    for one, other in held.values():
        assert np.array_equal(one["rows"], other["rows"])
        assert one["stamps"].tolist() == other["stamps"].tolist() == [8] * EXAMPLES


def test_bytes_are_few(comm: Communicator) -> None:
    full, few = made(comm), made(comm, forward=Direct(RowQuantizer(2)), backward=Direct(TopRows(0.2, RowQuantizer(8))))
    for party in (full, few):
        one_step(party)
        one_step(party)
    working = in_turn(full)
    assert full.bytes_sent == ((2 * (EXAMPLES * WIDTH * 4 + 64),) * 2 if working else (0, 0))
    assert few.bytes_sent == ((2 * (EXAMPLES * 4 + 64), 2 * (EXAMPLES * 5 + 64)) if working else (0, 0))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("number", [FIRST, MIDDLE, LAST])
def test_layers_that_fail_are_reported_on_both_ends_and_the_step_can_be_repeated(
    comm: Communicator, number: int, backward: bool, trained: bool
) -> None:
    options: dict[str, Any] = {
        "forward": Deltas(FullRows("float16"), EXAMPLES),
        "backward": Direct(FullRows("float16")),
    }
    party, other = made(comm, **options), made(comm, **options)
    for one in (party, other) if trained else ():
        one_step(one)
        for layer in layers(one):
            layer.zero_grad()
    failing = [layer for layer in layers(party) if (number == MIDDLE) == (comm.rank == 0)][number // 2 :][:1]
    for layer in failing:
        layer.fails_backward, layer.ruin = backward, None if backward else fail
    where = "server" if number == MIDDLE else "client 0"
    if in_turn(party):
        with pytest.raises(PipelineError, match=f"the step failed: {where}: ValueError: no layer today"):
            one_step(party)
    else:
        with pytest.raises(PipelineError, match=r"the turn of client 0 failed: rank 0: .*no layer today"):
            one_step(party)
    assert all(parameter.grad is None for layer in layers(party) for parameter in layer.parameters())
    for layer in failing:
        layer.fails_backward, layer.ruin = False, None
    assert one_step(party) == one_step(other)
    for mine, theirs in zip(layers(party), layers(other), strict=True):
        for weights, same in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (weights.grad is None) == (same.grad is None) == (not in_turn(party))
            assert weights.grad is None or same.grad is None or torch.equal(weights.grad, same.grad)
    assert visits(party) == visits(other)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("number", [FIRST, MIDDLE, LAST])
def test_a_step_that_is_repeated_finds_gradients_and_buffers_as_they_were(
    comm: Communicator, number: int, zeros: bool
) -> None:
    party, other = made(comm), made(comm)
    for one in (party, other):
        one_step(one)
        for layer in layers(one) if zeros else ():
            layer.zero_grad(set_to_none=False)
    failing = [layer for layer in layers(party) if (number == MIDDLE) == (comm.rank == 0)][number // 2 :][:1]
    for layer in failing:
        layer.fails_backward = True
    with pytest.raises(PipelineError, match="no layer today"):
        one_step(party)
    for layer in failing:
        layer.fails_backward = False
    assert one_step(party) == one_step(other)
    for mine, theirs in zip(layers(party), layers(other), strict=True):
        assert torch.equal(mine.seen, theirs.seen)
        for weights, same in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert weights.grad is None or same.grad is None or torch.equal(weights.grad, same.grad)


def _not_a_number(x: Tensor) -> Tensor:
    return x * float("nan")


def _wide(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)


@pytest.mark.parametrize(
    ("ruin", "number", "told"),
    [
        (_not_a_number, FIRST, "client 0: ValueError: the values contain NaN or infinity"),
        (_not_a_number, MIDDLE, "server: ValueError: the values contain NaN or infinity"),
        (_wide, MIDDLE, r"server: .*has shape \[8, 12\], and before an example's was \[6\]"),
        (_wide, FIRST, r"client 0: .*has shape \[8, 12\], and before an example's was \[6\]"),
    ],
)
def test_activations_that_cannot_be_sent_are_reported_on_both_ends(
    comm: Communicator, ruin: Any, number: int, told: str
) -> None:
    party = made(comm, forward=Direct(RowQuantizer(8)))
    one_step(party)
    if (number == MIDDLE) == (comm.rank == 0):
        layers(party)[0].ruin = ruin
    with pytest.raises(PipelineError, match=told):
        one_step(party)
    layers(party)[0].ruin = None
    one_step(party)


@pytest.mark.parametrize("number", [FIRST, MIDDLE])
def test_a_step_can_be_repeated_in_its_turn_where_both_ends_catch_the_error(comm: Communicator, number: int) -> None:
    options: dict[str, Any] = {"forward": Deltas(RowQuantizer(4, "stochastic"), EXAMPLES)}
    party, other = made(comm, **options), made(comm, **options)
    layer = layers(party)[0]
    if (number == MIDDLE) == (comm.rank == 0):
        layer.ruin = fail
    inputs, targets = data(0)
    begin = party.serve if isinstance(party, SplitServer) else partial(party.step, inputs, targets, np.arange(EXAMPLES))
    found: float | None = None
    with party.turn(0) as takes_part:
        if takes_part:
            with pytest.raises(PipelineError, match="no layer today"):
                begin()
            layer.ruin = None
            found = begin()
        if isinstance(party, SplitServer):
            assert not party.serve()
    loss = one_step(other)
    assert loss is None or loss == found
    assert visits(party) == visits(other)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ids": np.arange(EXAMPLES) + 1}, "id 8 is not one of 8 examples"),
        ({"ids": np.zeros(EXAMPLES, np.int64)}, "id 0 occurs 8 times in a batch"),
        ({"ids": None}, "keeps a message for each example: pass ids="),
        ({"targets": torch.zeros(3, WIDTH)}, "there are 8 inputs, 3 targets, 8 ids"),
        ({"inputs": None}, "has no inputs"),
        ({"inputs": torch.zeros(0, WIDTH), "targets": [], "ids": np.arange(0)}, "the batch is empty"),
    ],
)
def test_a_wrong_batch_is_refused_on_both_ends(comm: Communicator, wrong: dict[str, Any], told: str) -> None:
    party = made(comm, forward=Deltas(FullRows("float16"), EXAMPLES))
    with pytest.raises(PipelineError, match=f"the step was not begun: client 0: .*{told}"):
        one_step(party, **wrong)
    one_step(party)


@pytest.mark.parametrize("check_every", [1, 100])
def test_a_client_hears_that_the_server_has_left_and_all_that_the_turn_failed(
    comm: Communicator, check_every: int
) -> None:
    party = made(comm, forward=Deltas(FullRows("float16"), EXAMPLES, check_every=check_every))
    one_step(party)
    if isinstance(party, SplitServer):
        with pytest.raises(KeyError, match="no such thing"), party.turn(0):
            raise KeyError("no such thing")
    elif party.has(0):
        with pytest.raises(PipelineError, match=r"not begun: server: it has left the turn, after KeyError: 'no such"):
            one_step(party)
    else:
        with pytest.raises(PipelineError, match="the turn of client 0 failed: rank 0: KeyError: 'no such thing'"):
            one_step(party)
    one_step(party)


def test_the_server_hears_that_a_client_has_left(comm: Communicator) -> None:
    party = made(comm)
    if isinstance(party, SplitClient) and party.has(0):
        with pytest.raises(KeyError, match="no such thing"), party.turn(0):
            raise KeyError("no such thing")
    else:
        served = []
        with pytest.raises(PipelineError, match="the turn of client 0 failed: rank 1: KeyError"), party.turn(0):
            served = [party.serve()] if isinstance(party, SplitServer) else []
        assert served == [False] * (comm.rank == 0)
    one_step(party)


def test_training_goes_on_from_a_state_bit_by_bit_and_from_ends_that_differ(comm: Communicator) -> None:
    options: dict[str, Any] = {"forward": Deltas(RowQuantizer(4, "stochastic"), EXAMPLES), "seed": 3}
    party, again = made(comm, **options), made(comm, **options)
    for client in (0, 1):
        train_turn(party, client)
    again.load_state_dict(party.state_dict())
    for mine, saved in zip(layers(again), layers(party), strict=True):
        mine.load_state_dict(saved.state_dict())
    assert again.steps == party.steps == {2: (4, 4), 3: (4, 2, 2)}[comm.size][comm.rank]
    for client in (2, 1):  # with three ranks the weights of client 1 travel to client 2
        assert train_turn(party, client) == train_turn(again, client)
    behind = again.state_dict()
    if comm.rank == 0:
        behind["cuts"][1][0]["activations"]["store"]["stamps"][:3] -= 1
    again.load_state_dict(behind)
    assert again.compare_stores() == 0
    stamps = again.state_dict()["cuts"].get(1)
    if stamps is not None:
        assert len(stamps[0]["activations"]["store"]["ids"]) == EXAMPLES - 3
    train_turn(again, 1)


def test_a_state_of_another_rank_is_refused_on_all(comm: Communicator) -> None:
    party = made(comm)
    states = comm.allgather_object(party.state_dict())
    with pytest.raises(PipelineError, match=r"rank 0: the state is of {'rank': 1, .*; rank 1: the state is of"):
        party.load_state_dict(states[comm.rank ^ 1] if comm.rank < 2 else states[2])


@pytest.mark.mpi(min_size=3)
def test_states_of_different_turns_are_refused_on_all(comm: Communicator) -> None:
    party = made(comm)
    states = []
    for client in (0, 1):
        one_step(party, client)
        states.append(party.state_dict())
    with pytest.raises(PipelineError, match="rank 1: the last turn of its state was that of client 0: load states of"):
        party.load_state_dict(states[comm.rank != 1])
    one_step(party, 2)


def test_states_after_turns_of_different_clients_of_one_rank_are_loaded(comm: Communicator) -> None:
    party = made(comm)
    states = []
    for client in (0, 2):  # both on rank 1
        one_step(party, client)
        states.append(party.state_dict())
    party.load_state_dict(states[comm.rank == 1])
    one_step(party, 1)
    party.load_state_dict(states[comm.rank != 1])
    one_step(party, 1)
    damaged = states[0] | ({"weights_of": CLIENTS} if comm.rank == 1 else {})
    with pytest.raises(PipelineError, match="loaded: rank 1: the state is damaged, as its last turn was that of cl"):
        party.load_state_dict(damaged)


def test_other_clients_train_on_after_a_file_that_failed_refused_a_state(comm: Communicator, folder: Path) -> None:
    party = made(comm, forward=Deltas(RowQuantizer(4), EXAMPLES, folder=folder))
    for client in (0, 1):
        one_step(party, client)
    state = party.state_dict()
    if comm.rank == 0:
        fail_store(party._cuts[0][0])
    with pytest.raises(PipelineError, match=r"not loaded on all ranks: .*rank 0: OSError: .*disk is full"):
        party.load_state_dict(state)
    one_step(party, 1)
    with pytest.raises(PipelineError, match=r"server: OSError: .*disk is full"):
        one_step(party, 0)
    one_step(party, 2)
    with pytest.raises(OSError, match="disk is full") if comm.rank == 0 else nullcontext():
        party.forget_messages()
    one_step(party, 1)
    with pytest.raises(OSError, match="disk is full") if comm.rank == 0 else nullcontext():
        party.close()
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match="the store is closed"):
            party._cuts[1][0].codings["activations"]._store.all_stamps()


def test_messages_that_differ_between_the_two_ends_are_noticed(comm: Communicator) -> None:
    party = made(comm, forward=Deltas(FullRows("float16"), EXAMPLES, check_every=1))
    one_step(party)
    if comm.rank == 0:
        store = party._cuts[0][1].codings["activations"]._store
        store.write([3], np.ones((1, WIDTH), np.float32), stamps=[1])
    for _ in range(3):
        with pytest.raises(PipelineError, match="kept different messages"):
            one_step(party)
    one_step(party, 1)  # whose messages are others
    party.forget_messages()
    for _ in range(2):
        one_step(party)
    party.close()


def test_predictions_are_those_of_one_process_and_keep_nothing(comm: Communicator) -> None:
    party = made(comm, forward=Deltas(RowQuantizer(2), EXAMPLES), backward=Direct(FullRows("float16")))
    before = party.state_dict() | {"weights_of": 1}
    whole = nn.Sequential(Layer(FIRST), Layer(MIDDLE), Layer(LAST)).eval()
    for size in (EXAMPLES, 3):
        inputs = data(1)[0][:size]
        found = prediction(party, 1, inputs)
        assert found is None or torch.equal(found, whole(inputs))
        assert (found is not None) == (isinstance(party, SplitClient) and party.has(1))
    assert party.state_dict() == before
    assert all(layer.training and layer.seen == 0 for layer in layers(party))


@pytest.mark.parametrize("number", [FIRST, MIDDLE, LAST])
def test_predictions_that_fail_are_reported_on_both_ends(comm: Communicator, number: int) -> None:
    party = made(comm)
    for layer in [one for one in layers(party) if (number == MIDDLE) == (comm.rank == 0)][number // 2 :][:1]:
        layer.ruin = fail
    with pytest.raises(PipelineError, match=f"{'server' if number == MIDDLE else 'client 0'}: ValueError: no layer"):
        prediction(party, 0, data(0)[0])
    for layer in layers(party):
        layer.ruin = None
        assert layer.training
    one_step(party)


def test_ranks_that_name_different_clients_are_refused(comm: Communicator) -> None:
    party = made(comm)
    for named in (1 if comm.rank == 0 else 0, CLIENTS):
        with pytest.raises(PipelineError, match="do not name the same client"), party.turn(named):
            raise AssertionError
    one_step(party)


def test_steps_outside_of_a_turn_are_refused(comm: Communicator) -> None:
    party = made(comm)
    begin = party.serve if isinstance(party, SplitServer) else partial(party.step, *data(0))
    with pytest.raises(RuntimeError, match="no client's turn"):
        begin()
    with (
        party.turn(0),
        pytest.raises(RuntimeError, match=f"^{comm.here}: the turn of client 0 has not ended"),
        party.turn(1),
    ):
        raise AssertionError


def test_a_turn_that_a_timeout_has_ended_does_not_block_the_next_one(comm: Communicator) -> None:
    party = made(comm)
    with pytest.raises(CollectiveTimeout), party.turn(0):
        raise CollectiveTimeout("late")
    one_step(party)


def test_options_that_differ_or_cannot_be_are_refused_on_all_ranks(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="the ranks are given different options"):
        made(comm, seed=comm.rank)
    with pytest.raises(PipelineError, match="pass Direct as backward=, not Deltas"):
        made(comm, backward=Deltas(RowQuantizer(2), EXAMPLES))
    with pytest.raises(PipelineError, match="rank 1: the server is on rank 0"):
        SplitServer(Layer(MIDDLE), comm, CLIENTS)
    with pytest.raises(PipelineError, match="rank 0: rank 0 is the server's"):
        SplitClient(Layer(FIRST), Layer(LAST), comm, CLIENTS, loss=nn.functional.mse_loss)


@pytest.mark.mpi(min_size=3)
def test_clients_whose_layers_differ_are_refused(comm: Communicator) -> None:
    last = nn.Linear(WIDTH, 1 + comm.rank)
    with pytest.raises(PipelineError, match="the clients on ranks 1 and 2 have weights of different shapes"):
        made(comm, last)


def test_clients_are_spread_over_the_ranks(comm: Communicator) -> None:
    party = made(comm)
    places = [party.rank_of(client) for client in range(CLIENTS)]
    assert places == {2: [1, 1, 1], 3: [1, 2, 1]}[comm.size]
