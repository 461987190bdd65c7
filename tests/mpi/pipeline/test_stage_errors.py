"""A failure of one stage is an error on all, and a step that can be repeated is repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.codecs.rows import FullRows, RowQuantizer
from mpicomp.pipeline import (
    Action,
    Backward,
    Deltas,
    Direct,
    Forward,
    MessageStore,
    PipelineError,
    PipelineStage,
    gpipe,
    one_forward_one_backward,
)
from tests.mpi.lanes import few_ranks
from tests.mpi.pipeline.stages import EXAMPLES, MICRO_BATCHES, WIDTH, given, layer, staged

several = pytest.mark.mpi(min_size=2, max_size=3)


class Fails(nn.Module):
    """A layer that fails on request."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.left = inner, -1

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("no layer today")
        return self.inner(x)


@pytest.mark.mpi(max_size=4)  # the first of four receives the error through the second
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


class Normalized(Fails):
    """The layer, between running statistics and a counter that is put into the module again in each pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(nn.Sequential(nn.BatchNorm1d(WIDTH), inner, nn.BatchNorm1d(WIDTH)))
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return super().forward(x)


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("earlier", ["none", "zeros", "accumulated"])
def test_a_step_that_is_repeated_finds_gradients_and_buffers_as_they_were(
    comm: Communicator, micro_batch: int, earlier: str
) -> None:
    module, untouched = Normalized(layer(comm.rank)), Normalized(layer(comm.rank))
    stage, other = staged(comm, module), staged(comm, untouched)
    for one in (stage, other) if earlier != "none" else ():
        one.step(**given(comm))
        if earlier == "zeros":
            one.module.zero_grad(set_to_none=False)
    held = [parameter.grad for parameter in module.parameters()]
    module.left = micro_batch if comm.rank == comm.size - 1 else -1
    with pytest.raises(PipelineError, match="no layer today"):
        stage.step(**given(comm))
    assert [parameter.grad for parameter in module.parameters()] == held  # the same tensors: others may view them
    assert stage.step(**given(comm)) == other.step(**given(comm))
    for mine, theirs in zip(module.parameters(), untouched.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    for (name, buffer), theirs in zip(module.named_buffers(), untouched.buffers(), strict=True):
        assert torch.equal(buffer, theirs), name


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sparse_gradients_add_up_after_a_step_that_failed_in_any_mode_of_the_caller(
    comm: Communicator, mode: Any
) -> None:
    first = comm.rank == 0
    module = Fails(layer(comm.rank))
    stage = staged(comm, nn.Embedding(EXAMPLES, WIDTH, sparse=True) if first else module)
    batch = given(comm) | ({"inputs": torch.arange(EXAMPLES)} if first else {})
    stage.step(**batch)
    once = [parameter.grad.to_dense().clone() for parameter in stage.module.parameters() if parameter.grad is not None]
    module.left = 2
    with mode(), pytest.raises(PipelineError, match="no layer today"):
        stage.step(**batch)
    stage.step(**batch)
    for parameter, gradient in zip(stage.module.parameters(), once, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.to_dense(), 2 * gradient)


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_step_can_be_repeated_though_a_buffer_was_made_in_inference_mode(comm: Communicator) -> None:
    module = Fails(layer(comm.rank))
    with torch.inference_mode():
        module.register_buffer("table", torch.ones(WIDTH))
    stage = staged(comm, module)
    module.left = 2 if comm.rank else -1
    with pytest.raises(PipelineError, match="no layer today"):
        stage.step(**given(comm))
    assert stage.step(**given(comm)) > 0


@several
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
@several
def test_a_batch_that_one_stage_gets_wrong_is_refused_on_all(
    comm: Communicator, wrong: dict[str, Any], told: str
) -> None:
    stage = staged(comm, forward=Deltas(FullRows("float16"), EXAMPLES))
    where = comm.size - 1 if "targets" in wrong else 0
    batch = given(comm) | (wrong if comm.rank == where else {})
    with pytest.raises(PipelineError, match=told):
        stage.step(**batch)
    stage.step(**given(comm))


@several
def test_stages_with_different_options_refuse_each_other(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="the stages are given different options"):
        staged(comm, backward=Direct(FullRows("float16")) if comm.rank == 0 else None)


@several
@pytest.mark.parametrize("wrong", [False, True])
def test_messages_that_differ_are_refused_until_they_are_forgotten_or_loaded(comm: Communicator, wrong: bool) -> None:
    stage = staged(comm, forward=Deltas(RowQuantizer(8), EXAMPLES, check_every=1))
    stage.step(**given(comm))
    state, sound = stage.state_dict(), stage.state_dict()
    if comm.rank == 1:
        state["codings"]["activations before"]["store"]["rows"][3] = 0
    for cure in (stage.forget_messages, lambda: stage.load_state_dict(sound)):
        stage.load_state_dict(state)
        stage.step(**given(comm))
        batch = given(comm)
        if wrong and comm.rank == 0:
            batch["inputs"] = None
        with pytest.raises(PipelineError, match="stages 0 and 1 have kept different messages"):
            stage.step(**batch)
        for _ in range(2):
            with pytest.raises(PipelineError, match="stages 0 and 1 have kept different messages"):
                stage.step(**given(comm))
        assert stage.evaluate(given(comm)["inputs"], given(comm)["targets"]) > 0  # which needs no messages
        assert stage.compare_stores() == 0
        with pytest.raises(PipelineError, match="stages 0 and 1 have kept different messages"):
            stage.step(**given(comm))
        cure()
        stage.step(**given(comm))
        stage.step(**given(comm))


@several
def test_a_schedule_that_leaves_out_work_is_refused_on_all(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="the pipeline cannot be made: stage 0: stage 0 leaves out B3"):
        staged(comm, schedule=lambda *numbers: gpipe(*numbers)[:-1])


@several
def test_functions_that_make_different_schedules_are_refused_on_all(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="the stages are given different options"):
        staged(comm, schedule=gpipe if comm.rank == 0 else one_forward_one_backward)


@several
def test_numbers_of_numpy_on_one_stage_are_the_same_options_with_a_function_as_schedule(comm: Communicator) -> None:
    def counting_back(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
        numbers = [micro_batches - 1 - number for number in range(micro_batches)]
        return (*map(Forward, numbers), *map(Backward, numbers))

    number = np.int64(MICRO_BATCHES) if comm.rank == 0 else MICRO_BATCHES
    loss = nn.functional.mse_loss if comm.rank == comm.size - 1 else None
    for schedule in (gpipe, counting_back):
        stage = PipelineStage(layer(comm.rank), comm, number, loss=loss, schedule=schedule)
        assert stage.step(**given(comm)) > 0


@several
def test_training_goes_on_after_a_state_was_refused(comm: Communicator) -> None:
    stage = staged(comm, forward=Deltas(RowQuantizer(8), EXAMPLES, check_every=1))
    stage.step(**given(comm))
    state = stage.state_dict()
    if comm.rank == 1:
        state["codings"]["gradients before"] = {"damaged": 1}
    with pytest.raises(PipelineError, match="the state was not loaded on all stages: load another: stage 1"):
        stage.load_state_dict(state)
    stage.step(**given(comm))
    stage.step(**given(comm))
    assert stage.stores_alike()


@several
def test_not_a_number_is_refused_on_all_ranks(comm: Communicator) -> None:
    stage = staged(comm, forward=Direct(FullRows("float16")))
    batch = given(comm)
    if comm.rank == 0:
        batch["inputs"] = batch["inputs"] * float("nan")
    with pytest.raises(PipelineError, match="stage 0: ValueError: the values contain NaN or infinity"):
        stage.step(**batch)


@several
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_store_without_room_is_reported_on_all_ranks_and_the_step_can_be_repeated(
    comm: Communicator, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError("the rows take too many bytes")

    stage = staged(comm, forward=Deltas(RowQuantizer(2), EXAMPLES))
    full = int(where == "before")
    with monkeypatch.context() as patch:
        if comm.rank == full:
            patch.setattr(MessageStore, "__init__", refuse)
        with pytest.raises(PipelineError, match=f"stage {full}: MemoryError: the rows take too many bytes"):
            stage.step(**given(comm))
    stage.step(**given(comm))


@several
@pytest.mark.parametrize("kind", [OSError, OverflowError])
def test_messages_that_cannot_be_written_are_reported_on_all_ranks_at_the_next_step(
    kind: type[Exception], comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise kind("the disk is full")

    stage = staged(comm, forward=Deltas(RowQuantizer(2), EXAMPLES))
    stage.step(**given(comm))
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(MessageStore, "write", refuse)
        stage.step(**given(comm))
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"stage 1: messages of step 1 could not be kept \(the disk is full\)"):
            stage.step(**given(comm))
    stage.forget_messages()
    stage.step(**given(comm))
    stage.step(**given(comm))
    assert stage.stores_alike()


@few_ranks
def test_differences_of_gradients_are_refused(comm: Communicator) -> None:
    with pytest.raises(PipelineError, match="pass Direct as backward=, not Deltas"):
        staged(comm, backward=Deltas(RowQuantizer(2), EXAMPLES))


@several
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
