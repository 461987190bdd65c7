"""Stages on real ranks: the gradients of one process, and equal messages on both ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.codecs.rows import FullRows, LevelRows, RowQuantizer, TopRows
from mpicomp.pipeline import Action, Backward, Deltas, Direct, Forward, PipelineStage, Schedule
from mpicomp.pipeline.messages import HEADER_BYTES
from tests.mpi.lanes import few_ranks, two_ranks
from tests.mpi.pipeline.stages import EXAMPLES, MICRO_BATCHES, WIDTH, data, given, layer, staged
from tests.reference.rows import encoded_in_levels


def one_at_a_time(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    return tuple(kind(k) for k in range(micro_batches) for kind in (Forward, Backward))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", one_at_a_time])
def test_gradients_are_those_of_one_process(comm: Communicator, schedule: str | Schedule) -> None:
    stage = staged(comm, schedule=schedule)
    loss = stage.step(**given(comm))
    whole = nn.Sequential(*map(layer, range(comm.size)))
    inputs, targets = data()
    expected = 0.0
    for part, target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        one = nn.functional.mse_loss(whole(part), target) / MICRO_BATCHES
        one.backward()
        expected += one.item()
    assert loss == expected
    for mine, theirs in zip(stage.module.parameters(), whole[comm.rank].parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.mpi(min_size=2)
def test_one_forward_one_backward_keeps_no_more_micro_batches_than_there_are_stages_left(comm: Communicator) -> None:
    stage, all_kept = staged(comm), staged(comm, schedule="gpipe")
    for one in (stage, all_kept):
        one.step(**given(comm))
    assert stage.most_alive == min(MICRO_BATCHES, comm.size - comm.rank)
    assert all_kept.most_alive == MICRO_BATCHES


@few_ranks
@pytest.mark.parametrize(
    "codec", [FullRows("float16"), RowQuantizer(2), RowQuantizer(4, "stochastic"), LevelRows(8)], ids=str
)
@pytest.mark.mpi(min_size=2)
def test_both_ends_of_each_cut_keep_the_same_messages_and_activations_travel_as_differences(
    comm: Communicator, codec: Any
) -> None:
    stage = staged(comm, forward=Deltas(codec, EXAMPLES, check_every=2), backward=Direct(RowQuantizer(8)))
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.5)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(stage.step(**given(comm)))
        optimizer.step()
    assert losses[-1] < losses[0]
    states = comm.allgather_object(stage.state_dict()["codings"])
    for before, after in pairwise(states):
        one, other = before["activations after"]["store"], after["activations before"]["store"]
        assert np.array_equal(one["rows"], other["rows"])
        assert one["stamps"].tolist() == other["stamps"].tolist() == [6] * EXAMPLES


@two_ranks
def test_rows_in_levels_train_as_in_a_simulation_of_both_stages(comm: Communicator) -> None:
    """Activations have 100 columns: a bucket of 64 and one of 36."""

    def slices() -> list[nn.Module]:
        torch.manual_seed(3)
        return [nn.Sequential(nn.Linear(WIDTH, 100), nn.Tanh()), nn.Linear(100, WIDTH)]

    forward, backward, steps = LevelRows(4, 64), LevelRows(16, 64), 5
    module = slices()[comm.rank]
    stage = staged(comm, module, forward=Deltas(forward, EXAMPLES), backward=Direct(backward))
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(stage.step(**given(comm)))
        optimizer.step()

    both, messages, (inputs, targets) = (
        slices(),
        np.zeros((MICRO_BATCHES, EXAMPLES // MICRO_BATCHES, 100), np.float32),
        data(),
    )
    optimizer, expected = torch.optim.SGD(nn.ModuleList(both).parameters(), lr=0.5), []
    for step in range(steps):
        optimizer.zero_grad()
        expected.append(0.0)
        for part, target, kept in zip(*(one.chunk(MICRO_BATCHES) for one in (inputs, targets)), messages, strict=True):
            activations = both[0](part)
            found = activations.detach().numpy()
            kept[:] = kept + encoded_in_levels(forward, found - kept)[1] if step else found
            received = torch.from_numpy(kept.copy()).requires_grad_()
            loss = nn.functional.mse_loss(both[1](received), target) / MICRO_BATCHES
            loss.backward()
            expected[-1] += loss.item()
            activations.backward(torch.from_numpy(encoded_in_levels(backward, received.grad.numpy())[1]))
        optimizer.step()
    assert losses == expected
    assert losses[-1] < losses[0]
    for mine, simulated in zip(module.parameters(), both[comm.rank].parameters(), strict=True):
        assert torch.equal(mine, simulated)
    # planes of 8 bytes, and a scale of 2, for each of two buckets; activations of the first step are float32
    coded = (4 * 100 + 4 * 2 * (2 * 8 + 2), 5 * 2 * (4 * 8 + 2))[comm.rank]
    assert stage.bytes_sent[comm.rank] == steps * MICRO_BATCHES * HEADER_BYTES + EXAMPLES * coded


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_training_goes_on_from_a_state_bit_by_bit_and_from_ends_that_differ(comm: Communicator) -> None:
    options = {"forward": Deltas(FullRows("float16"), EXAMPLES)}
    stage, again = staged(comm, **options), staged(comm, **options)
    stage.step(**given(comm))
    again.load_state_dict(stage.state_dict())
    assert again.steps == 1
    with torch.no_grad():
        for one in (stage, again):
            for parameter in one.module.parameters():
                parameter.add_(0.25)
    assert stage.step(**given(comm)) == again.step(**given(comm))
    behind = stage.state_dict()
    if comm.rank == 0:
        behind = staged_state(stage, again)
    assert again.compare_stores() == 0
    again.load_state_dict(behind)
    assert again.step(**given(comm)) > 0


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_ends_that_load_states_of_different_steps_train_on(comm: Communicator) -> None:
    stage = staged(comm, forward=Deltas(RowQuantizer(8), EXAMPLES, check_every=3))
    states = []
    for _ in range(2):
        stage.step(**given(comm))
        states.append(stage.state_dict())
    stage.load_state_dict(states[comm.rank % 2])
    for _ in range(6):
        stage.step(**given(comm))
    assert stage.stores_alike()


def staged_state(stage: PipelineStage, other: PipelineStage) -> dict[str, Any]:
    """A state whose store counts a visit less."""
    state = stage.state_dict()
    state["codings"]["activations after"]["store"]["stamps"] -= 1
    return state


@pytest.mark.mpi(max_size=3)
def test_evaluation_has_a_loss_with_layers_in_evaluation_mode(comm: Communicator) -> None:
    loss = LossOfNormalized()
    stage = PipelineStage(layer(comm.rank), comm, MICRO_BATCHES, loss=loss if comm.rank == comm.size - 1 else None)
    assert stage.evaluate(given(comm)["inputs"], given(comm)["targets"]) > 0
    assert loss.norm.num_batches_tracked == 0
    assert loss.norm.training


class LossOfNormalized(nn.Module):
    """A loss with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(output), targets)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_adds_gradients_in_any_mode_of_the_caller(comm: Communicator, mode: Any) -> None:
    stages = staged(comm), staged(comm)
    batch = given(comm)
    expected = stages[0].step(**batch)
    with mode():
        assert stages[1].step(**batch) == expected
    for one, other in zip(*(stage.module.parameters() for stage in stages), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_evaluation_is_that_of_one_process_and_keeps_nothing(comm: Communicator) -> None:
    stage = staged(comm, forward=Deltas(FullRows("float16"), EXAMPLES), backward=Direct(FullRows("float16")))
    batch = given(comm)
    before = stage.state_dict()
    loss = stage.evaluate(batch["inputs"], batch["targets"])
    whole = nn.Sequential(*map(layer, range(comm.size)))
    inputs, targets = data()
    assert loss == nn.functional.mse_loss(whole(inputs), targets).item()
    assert stage.state_dict() == before
    stage.step(**batch)


@few_ranks
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_evaluation_needs_no_ids_with_any_number_of_micro_batches(comm: Communicator, micro_batches: int) -> None:
    loss = nn.functional.mse_loss if comm.rank == comm.size - 1 else None
    forward = Deltas(FullRows("float16"), EXAMPLES)
    stage = PipelineStage(layer(comm.rank), comm, micro_batches, loss=loss, forward=forward)
    batch = given(comm)
    assert stage.evaluate(batch["inputs"], batch["targets"]) > 0


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_the_largest_gradients_alone_go_back_and_bytes_are_counted(comm: Communicator) -> None:
    stage = staged(comm, forward=Direct(RowQuantizer(2)), backward=Direct(TopRows(0.2, RowQuantizer(8))))
    stage.step(**given(comm))
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    rows, header = EXAMPLES, MICRO_BATCHES * HEADER_BYTES
    forward = 0 if last else rows * (2 + 2) + header  # a scale, and 6 codes of 2 bits
    backward = 0 if first else rows * (2 + 2 + 1) + header  # a scale, 2 codes of 8 bits, and which 2 of 6 these are
    assert stage.bytes_sent == (forward, backward)
    stage.evaluate(given(comm)["inputs"], given(comm)["targets"])
    assert stage.bytes_sent == (forward, backward)


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_stores_are_alike_until_one_end_keeps_something_else(comm: Communicator) -> None:
    stage = staged(comm, forward=Deltas(RowQuantizer(2), EXAMPLES))
    assert stage.stores_alike()
    for _ in range(2):
        stage.step(**given(comm))
        assert stage.stores_alike()
    state = stage.state_dict()
    if comm.rank == 1:
        state["codings"]["activations before"]["store"]["rows"][3] += 1
    stage.load_state_dict(state)
    assert not stage.stores_alike()
    stage.close()


def test_codecs_without_differences_are_refused() -> None:
    with pytest.raises(TypeError, match=r"TopRows\(.* sends no differences"):
        Deltas(TopRows(), EXAMPLES)
