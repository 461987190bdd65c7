"""Stages on real ranks: the same gradients as one process, errors on every rank, messages that both ends keep alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.codecs.rows import RowQuantizer
from mpicomp.codecs.rows_full import FullRows
from mpicomp.pipeline import Deltas, Direct, PipelineError, PipelineStage

EXAMPLES, WIDTH, MICRO_BATCHES = 12, 6, 4


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(EXAMPLES, WIDTH, generator=generator), torch.randn(EXAMPLES, WIDTH, generator=generator)


def staged(comm: Communicator, module: nn.Module | None = None, **options: Any) -> PipelineStage:
    loss = nn.functional.mse_loss if comm.rank == comm.size - 1 else None
    return PipelineStage(module or layer(comm.rank), comm, MICRO_BATCHES, loss=loss, **options)


def given(comm: Communicator) -> dict[str, Any]:
    inputs, targets = data()
    return {
        "inputs": inputs if comm.rank == 0 else None,
        "targets": targets if comm.rank == comm.size - 1 else None,
        "ids": np.arange(EXAMPLES),
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_are_those_of_one_process(comm: Communicator, schedule: str) -> None:
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


class Fails(nn.Module):
    """A layer that fails when it is told to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.left = inner, -1

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("no layer today")
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("trained", [False, True])
def test_a_stage_that_fails_is_named_on_all_and_the_step_can_be_repeated(
    comm: Communicator, micro_batch: int, trained: bool
) -> None:
    middle, module = comm.size // 2, Fails(layer(comm.rank))
    options = {"forward": Deltas(FullRows("float16"), EXAMPLES)}
    stage, other = staged(comm, module, **options), staged(comm, **options)
    for one in (stage, other) if trained else ():
        one.step(**given(comm))
    module.left = micro_batch if comm.rank == middle else -1
    for one in (stage, other):
        one.module.zero_grad()
    with pytest.raises(PipelineError, match=f"stage {middle}: ValueError: no layer today"):
        stage.step(**given(comm))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert stage.step(**given(comm)) == other.step(**given(comm))
    for mine, theirs in zip(module.parameters(), other.module.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.mpi(min_size=2)
def test_an_output_of_another_shape_is_refused_on_all_ranks(comm: Communicator) -> None:
    class Grows(nn.Module):
        wide = False

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x], 1) if self.wide else x * 1

    module = Grows()
    stage = staged(comm, module if comm.rank == 0 else None)
    stage.step(**given(comm))
    module.wide = True
    with pytest.raises(PipelineError, match=r"stage 0: .*has shape \[3, 12\], and before an example's was \[6\]"):
        stage.step(**given(comm))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ids": np.arange(EXAMPLES)[::-1]}, "given different batches"),
        ({"ids": np.zeros(EXAMPLES, np.int64)}, "id 0 occurs 12 times in a batch"),
        ({"ids": np.arange(EXAMPLES) + 1}, "id 12 is not one of 12 examples"),
        ({"ids": None}, "keeps a message for each example: pass ids="),
        ({"inputs": None}, "stage 0: the first stage has no inputs"),
        ({"targets": torch.zeros(8, WIDTH)}, "there are 8 targets, 12 ids"),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_a_batch_that_one_stage_gets_wrong_is_refused_on_all(
    comm: Communicator, wrong: dict[str, Any], told: str
) -> None:
    stage = staged(comm, forward=Deltas(FullRows("float16"), EXAMPLES))
    where = comm.size - 1 if "targets" in wrong else 0
    batch = given(comm) | (wrong if comm.rank == where else {})
    with pytest.raises(PipelineError, match=told):
        stage.step(**batch)
    stage.step(**given(comm))


def test_micro_batches_that_do_not_divide_are_refused(comm: Communicator) -> None:
    batch = {name: value if value is None else value[:10] for name, value in given(comm).items()}
    with pytest.raises(PipelineError, match="10 examples do not divide into 4 micro-batches"):
        staged(comm).step(**batch)


@pytest.mark.mpi(min_size=2)
def test_stages_with_different_options_refuse_each_other(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="the stages are given different options"):
        staged(comm, backward=Direct(FullRows("float16")) if comm.rank == 0 else None)


@pytest.mark.parametrize("codec", [FullRows("float16"), RowQuantizer(2), RowQuantizer(4, "stochastic")], ids=str)
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


@pytest.mark.mpi(min_size=2)
def test_messages_that_differ_between_the_two_ends_are_noticed(comm: Communicator) -> None:
    stage = staged(comm, forward=Deltas(FullRows("float16"), EXAMPLES, check_every=1))
    stage.step(**given(comm))
    if comm.rank == 1:
        store = stage._codings["activations before"]._store  # type: ignore[attr-defined]
        store.write([3], np.ones((1, WIDTH), np.float32), stamps=[1])
    with pytest.raises(PipelineError, match="stages 0 and 1 have kept different messages"):
        stage.step(**given(comm))
    stage.forget_messages()
    stage.step(**given(comm))
    stage.step(**given(comm))


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


def staged_state(stage: PipelineStage, other: PipelineStage) -> dict[str, Any]:
    """A state whose store counts a visit less."""
    state = stage.state_dict()
    state["codings"]["activations after"]["store"]["stamps"] -= np.uint32(1)
    return state


def test_evaluation_is_that_of_one_process_and_keeps_nothing(comm: Communicator) -> None:
    stage = staged(comm, forward=Deltas(FullRows("float16"), EXAMPLES), backward=Direct(FullRows("float16")))
    batch = given(comm)
    loss = stage.evaluate(batch["inputs"], batch["targets"])
    whole = nn.Sequential(*map(layer, range(comm.size)))
    inputs, targets = data()
    assert loss == nn.functional.mse_loss(whole(inputs), targets).item()
    assert all(
        coding.stamps() is None or not coding.stamps().any()  # type: ignore[union-attr]
        for coding in stage._codings.values()
    )
    stage.step(**batch)


@pytest.mark.mpi(min_size=2)
def test_not_a_number_is_refused_on_all_ranks(comm: Communicator) -> None:
    stage = staged(comm, forward=Direct(FullRows("float16")))
    batch = given(comm)
    if comm.rank == 0:
        batch["inputs"] = batch["inputs"] * float("nan")
    with pytest.raises(PipelineError, match="stage 0: ValueError: the values contain NaN or infinity"):
        stage.step(**batch)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_store_without_room_is_told_on_all_ranks_and_the_step_can_be_repeated(
    comm: Communicator, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("the rows take too many bytes")

    stage = staged(comm, forward=Deltas(RowQuantizer(2), EXAMPLES))
    full = int(where == "before")
    with monkeypatch.context() as patch:
        if comm.rank == full:
            patch.setattr("mpicomp.pipeline.activations.MessageStore", refuse)
        with pytest.raises(PipelineError, match=f"stage {full}: MemoryError: the rows take too many bytes"):
            stage.step(**given(comm))
    stage.step(**given(comm))


@pytest.mark.mpi(min_size=2)
def test_messages_that_cannot_be_written_are_told_on_all_ranks_at_the_next_step(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    stage = staged(comm, forward=Deltas(RowQuantizer(2), EXAMPLES))
    stage.step(**given(comm))
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr("mpicomp.pipeline.memory_store.MessageStore.write", refuse)
        stage.step(**given(comm))
    with pytest.raises(PipelineError, match=r"stage 1: messages of step 1 could not be kept \(the disk is full\)"):
        stage.step(**given(comm))


def test_differences_of_gradients_are_refused(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="pass Direct as backward=, not Deltas"):
        staged(comm, backward=Deltas(RowQuantizer(2), EXAMPLES))


@pytest.mark.mpi(min_size=2)
def test_messages_of_another_model_are_refused_on_all_ranks(comm: Communicator) -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3]

    options = {"forward": Deltas(RowQuantizer(2), EXAMPLES)}
    stage, other = staged(comm, **options), staged(comm, Narrow() if comm.rank == 0 else None, **options)
    stage.step(**given(comm))
    other.load_state_dict(stage.state_dict())
    with pytest.raises(
        PipelineError, match=r"stage 0: .*messages kept have shape \[6\], and an example's is now \[3\]"
    ):
        other.step(**given(comm))
