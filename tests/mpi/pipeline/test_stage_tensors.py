"""Stages with several tensors, masks, skips over stages, shared weights, small batches and other types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.codecs.rows import FullRows, RowQuantizer
from mpicomp.pipeline import Deltas, Direct, PipelineError, PipelineStage
from tests.mpi.lanes import few_ranks
from tests.mpi.pipeline.stages import EXAMPLES, MICRO_BATCHES, WIDTH, data, layer, staged

several = pytest.mark.mpi(min_size=2, max_size=3)
Way = Callable[[Any, Any], Any]  # of a slice's layer and its input


class Slice(nn.Module):
    """A layer inside of a function of its input."""

    def __init__(self, inner: nn.Module, way: Way) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: Any) -> Any:
        return self.way(self.inner, x)


def masked(inner: Any, x: dict[str, Any]) -> dict[str, Any]:
    """Activations, and masks and numbers that all stages use."""
    kept = x["mask"] & (x["length"][:, None] > 0)
    return {**x, "x": torch.where(kept, inner(x["x"]) + x["bias"].clamp(min=-1), x["x"])}


def skipped(inner: Any, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The first layer's output goes around the layers behind it, each of which adds it."""
    if len(x) == 1:
        now = inner(x[0])
        return now, now
    now, first = x
    return inner(now) + 0.5 * first, first


def doubled(inner: Any, x: Any) -> list[Any]:
    """A part of a tensor, and the tensor."""
    now = inner(x[1] if isinstance(x, list) else x)
    return [now[:, :3].reshape(-1, 1, 3), now, None, {"k": 3, "flag": True}]


def batch_of(way: Way) -> Any:
    inputs, _ = data()
    if way is masked:
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(EXAMPLES, WIDTH, generator=generator) < 0.7
        bias = torch.where(mask, 0.0, -torch.inf)
        return {"x": inputs, "mask": mask, "length": torch.arange(EXAMPLES), "bias": bias, "causal": True}
    return (inputs,) if way is skipped else inputs


def loss_of(way: Way) -> Callable[[Any, Any], Tensor]:
    def loss(output: Any, targets: Tensor) -> Tensor:
        found: Tensor = {masked: lambda: output["x"], skipped: lambda: output[0], doubled: lambda: output[1]}[way]()
        return nn.functional.mse_loss(found, targets)

    return loss


def cut(value: Any, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part]
    if isinstance(value, dict):
        return {key: cut(one, part) for key, one in value.items()}
    return tuple(cut(one, part) for one in value) if isinstance(value, tuple) else value


def stage_of(comm: Communicator, module: nn.Module, loss: Any, micro_batches: int = 4, **options: Any) -> PipelineStage:
    return PipelineStage(module, comm, micro_batches, loss=loss if comm.rank == comm.size - 1 else None, **options)


@pytest.mark.mpi(max_size=4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("way", [masked, skipped, doubled], ids=lambda way: way.__name__)
def test_several_tensors_give_the_gradients_of_one_process(comm: Communicator, way: Way, schedule: str) -> None:
    inputs, (_, targets) = batch_of(way), data()
    stage = stage_of(comm, Slice(layer(comm.rank), way), loss_of(way), schedule=schedule)
    whole = nn.Sequential(*(Slice(layer(number), way) for number in range(comm.size)))
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    for _ in range(2):
        stage.module.zero_grad()
        whole.zero_grad()
        loss, expected = stage.step(inputs if first else None, targets if last else None), 0.0
        for k in range(MICRO_BATCHES):
            part = slice(3 * k, 3 * k + 3)
            one = loss_of(way)(whole(cut(inputs, part)), targets[part]) / MICRO_BATCHES
            one.backward()
            expected += one.item()
        assert loss == expected
        for mine, theirs in zip(stage.module.parameters(), whole[comm.rank].parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-8)
    found = stage.predict(inputs if first else None)
    wanted = whole.eval()(inputs)
    assert (found is None) == (not last)
    if last:
        pick = {masked: lambda x: x["x"], skipped: lambda x: x[0], doubled: lambda x: x[1]}[way]
        assert torch.equal(pick(found), pick(wanted))


@several
@pytest.mark.parametrize("way", [masked, skipped, doubled], ids=lambda way: way.__name__)
def test_several_tensors_are_kept_alike_on_both_ends_and_go_on_from_a_state(comm: Communicator, way: Way) -> None:
    options: dict[str, Any] = {
        "forward": Deltas(RowQuantizer(8), EXAMPLES, check_every=1), "backward": Direct(RowQuantizer(8)),
    }  # fmt: skip
    inputs, (_, targets) = batch_of(way), data()
    given = {
        "inputs": inputs if comm.rank == 0 else None,
        "targets": targets if comm.rank == comm.size - 1 else None,
        "ids": np.arange(EXAMPLES),
    }
    stage, again = (stage_of(comm, Slice(layer(comm.rank), way), loss_of(way), **options) for _ in range(2))
    for _ in range(3):
        stage.step(**given)
        assert stage.stores_alike()
    names = {"masked": {"activations after"}}.get(way.__name__, {"activations after", "activations 1 after"})
    assert comm.rank or {name for name in stage.state_dict()["codings"] if name.startswith("activations")} == names
    again.load_state_dict(stage.state_dict())
    assert again.step(**given) == stage.step(**given)
    fresh = stage_of(comm, Slice(layer(comm.rank), way), loss_of(way), **options)
    again.load_state_dict(fresh.state_dict())  # of a stage that knows of no tensors yet
    assert again.step(**given) == fresh.step(**given)
    assert again.stores_alike()
    stage.forget_messages()
    stage.step(**given)
    assert stage.stores_alike()


@several
@pytest.mark.parametrize(
    ("output", "told"),
    [
        (lambda x: {1: x}, "returns a dict"),
        (lambda x: (x, np.zeros(3)), "returns a ndarray"),
        (lambda x: None, "returns no tensor"),
        (lambda x: (x, torch.zeros(2, 2, dtype=torch.bool)), r"returns shape \[2, 2\] for 3 examples"),
        (lambda x: (x, x.double()), "a tensor of torch.float64"),
        (lambda x: x.argmax(1), "a tensor of torch.int64"),
        (lambda x: x.sum(1), r"returns shape \[3\] for 3 examples"),
    ],
)
def test_outputs_that_cannot_travel_are_named_on_all_ranks(comm: Communicator, output: Any, told: str) -> None:
    module = Slice(layer(comm.rank), lambda inner, x: output(inner(x))) if comm.rank == 0 else None
    inputs, targets = data()
    given = inputs if comm.rank == 0 else None, targets if comm.rank == comm.size - 1 else None
    with pytest.raises(PipelineError, match=f"stage 0: .*{told}"):
        staged(comm, module).step(*given)
    with pytest.raises(PipelineError):
        staged(comm, module).evaluate(*given)


@several
def test_another_structure_or_type_than_before_is_refused_on_all_ranks(comm: Communicator) -> None:
    outputs: list[Callable[[Tensor], Any]] = [
        lambda x: (x, x > 0), lambda x: [x, x > 0], lambda x: (x, (x > 0).int()), lambda x: (x, x > 0),
    ]  # fmt: skip
    first = Slice(layer(0), lambda inner, x: outputs.pop(0)(inner(x)))
    later = Slice(layer(comm.rank), lambda inner, x: inner(x[0] if isinstance(x, tuple) else x))
    stage = stage_of(comm, first if comm.rank == 0 else later, nn.functional.mse_loss, 1)
    inputs, targets = data()
    given = inputs if comm.rank == 0 else None, targets if comm.rank == comm.size - 1 else None
    for told in (None, "has the structure", "has a tensor of torch.int32", None):
        if told is None:
            stage.step(*given)
        else:
            with pytest.raises(PipelineError, match=f"stage 0: .*{told}"):
                stage.step(*given)


@few_ranks
@pytest.mark.parametrize("examples", [10, 5, 4, 3, 1])
def test_a_smaller_batch_gives_the_gradients_of_its_mean_loss(comm: Communicator, examples: int) -> None:
    stage = staged(comm, forward=Deltas(FullRows(), EXAMPLES))
    inputs, targets = data()
    for taken in (EXAMPLES, examples, EXAMPLES):
        stage.module.zero_grad()
        ids = np.arange(EXAMPLES)[-taken:]
        loss = stage.step(
            inputs[-taken:] if comm.rank == 0 else None,
            targets[-taken:] if comm.rank == comm.size - 1 else None,
            ids.tolist(),
        )
        whole = nn.Sequential(*map(layer, range(comm.size)))
        expected = nn.functional.mse_loss(whole(inputs[-taken:]), targets[-taken:])
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for mine, theirs in zip(stage.module.parameters(), whole[comm.rank].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@few_ranks
def test_modules_of_bfloat16_are_stages(comm: Communicator) -> None:
    stage = staged(comm, layer(comm.rank).to(torch.bfloat16))
    whole = nn.Sequential(*map(layer, range(comm.size))).to(torch.bfloat16)
    inputs, targets = (one.to(torch.bfloat16) for one in data())
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    stage.step(inputs if first else None, targets if last else None)
    for part, target in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        torch.autograd.backward(nn.functional.mse_loss(whole(part), target) / MICRO_BATCHES)
    for mine, theirs in zip(stage.module.parameters(), whole[comm.rank].parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)
    found = stage.predict(inputs if first else None)
    assert found is None or torch.equal(found, whole(inputs))


@few_ranks
def test_predictions_are_those_of_one_process_in_evaluation_mode_and_keep_nothing(comm: Communicator) -> None:
    module = nn.Sequential(layer(comm.rank), nn.Dropout(0.5))
    stage = staged(comm, module, forward=Deltas(RowQuantizer(2), EXAMPLES))
    inputs, targets = data()
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    before = stage.state_dict()
    whole = nn.Sequential(*map(layer, range(comm.size)))
    for taken in (EXAMPLES, 5):
        found = stage.predict(inputs[:taken] if first else None)
        assert (found is None) == (not last)
        assert found is None or (torch.equal(found, whole(inputs[:taken])) and not found.requires_grad)
    exact = nn.functional.mse_loss(whole(inputs), targets).item()
    assert stage.evaluate(inputs if first else None, targets if last else None) == exact
    assert stage.state_dict() == before
    assert module[1].training


class Tied(nn.Module):
    """Symbols to activations, or activations to scores of symbols, by one weight."""

    def __init__(self, seed: int, embeds: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared, self.inner, self.embeds = nn.Parameter(torch.randn(9, WIDTH)), layer(seed), embeds

    def forward(self, x: Tensor) -> Tensor:
        embedded = nn.functional.embedding(x, self.shared) if self.embeds else x
        out: Tensor = self.inner(embedded)
        return out if self.embeds else out @ self.shared.T


@several
@pytest.mark.parametrize("fails", [False, True])
def test_gradients_of_a_weight_that_first_and_last_stage_share_are_summed(comm: Communicator, fails: bool) -> None:
    first, last = comm.rank == 0, comm.rank == comm.size - 1
    module: Any = Tied(comm.rank, first) if first or last else layer(comm.rank)
    tied = {"embedding": module.shared} if first or last else None
    cross_entropy = nn.functional.cross_entropy
    stage = stage_of(comm, module, cross_entropy, tied=tied)
    parts: list[Any] = [Tied(0, True), *map(layer, range(1, comm.size - 1)), Tied(comm.size - 1, False)]
    parts[-1].shared = parts[0].shared
    whole = nn.Sequential(*parts)
    optimizer, other = torch.optim.Adam(module.parameters(), 0.1), torch.optim.Adam(whole.parameters(), 0.1)
    symbols = torch.arange(EXAMPLES) % 9
    for step in range(3):
        for one in (optimizer, other):
            one.zero_grad()
        for _ in range(2):  # gradients of two steps are accumulated
            if fails and step == 1:
                handle = module.register_forward_pre_hook(_fail) if last else None
                with pytest.raises(PipelineError, match="no layer today"):
                    stage.step(symbols if first else None, symbols if last else None)
                if handle is not None:
                    handle.remove()
            stage.step(symbols if first else None, symbols if last else None)
            cross_entropy(whole(symbols), symbols).backward()
        for one in (optimizer, other):
            one.step()
        if first or last:
            torch.testing.assert_close(module.shared, parts[0].shared, rtol=0, atol=1e-4)
    held = comm.allgather_object(module.shared.detach().numpy().tobytes() if first or last else None)
    assert held[0] == held[-1]


def _fail(*_: object) -> None:
    raise ValueError("no layer today")


@several
def test_shared_weights_that_differ_or_stand_alone_are_refused_on_all_ranks(comm: Communicator) -> None:
    module = layer(comm.rank)
    inputs, targets = data()
    given = inputs if comm.rank == 0 else None, targets if comm.rank == comm.size - 1 else None
    weight, bias = module.parameters()
    with pytest.raises(PipelineError, match="'w' must be one of the same shape and type on two stages or more"):
        staged(comm, module, tied={"w": weight} if comm.rank == 0 else None)
    with pytest.raises(PipelineError, match=r"it is stage 0: torch.float32\[6, 6\], stage 1: torch.float32\[6\]"):
        staged(comm, module, tied={"w": weight if comm.rank == 0 else bias})
    with pytest.raises(PipelineError, match="it is stage 0: no parameter"):
        staged(comm, module, tied={"w": weight.detach()})
    stage = staged(comm, module, tied={"w": weight})
    stage.step(*given)
    with torch.no_grad():
        weight.add_(comm.rank)
    with pytest.raises(PipelineError, match="the tied parameter 'w' differs between the stages"):
        stage.step(*given)


@few_ranks
def test_numbers_of_numpy_are_options_and_states_are_loaded_by_default(comm: Communicator, folder: Any) -> None:
    forward = Deltas(RowQuantizer(np.int64(4)), np.int64(EXAMPLES), check_every=np.int32(2))
    loss = nn.functional.mse_loss if comm.rank == comm.size - 1 else None
    made = [
        PipelineStage(layer(comm.rank), comm, np.int64(4), loss=loss, forward=forward, seed=np.int64(3))
        for _ in range(2)
    ]
    inputs, targets = data()
    given = inputs if comm.rank == 0 else None, targets if comm.rank == comm.size - 1 else None, range(EXAMPLES)
    for _ in range(2):
        made[0].step(*given)
    torch.save(made[0].state_dict(), folder / f"{comm.rank}.pt")
    made[1].load_state_dict(torch.load(folder / f"{comm.rank}.pt"))
    assert made[1].step(*given) == made[0].step(*given)
    assert made[1].stores_alike()


@several
def test_a_folder_that_is_missing_is_made(comm: Communicator, folder: Any) -> None:
    stage = staged(comm, forward=Deltas(RowQuantizer(4), EXAMPLES, folder=folder / "new" / "messages"))
    inputs, targets = data()
    stage.step(inputs if comm.rank == 0 else None, targets if comm.rank == comm.size - 1 else None, range(EXAMPLES))
    stage.close()
    comm.barrier()
    assert len(list((folder / "new" / "messages").iterdir())) == 2 * (comm.size - 1)


@several
def test_images_are_coded_in_rows_that_are_long_enough(comm: Communicator) -> None:
    """A scale for each channel of 8 x 8 elements, and not for each row of 8."""
    way = Slice(nn.Conv2d(4, 4, 3, padding=1), lambda inner, x: inner(x))
    options: dict[str, Any] = {"forward": Deltas(RowQuantizer(2), EXAMPLES), "backward": Direct(RowQuantizer(2))}
    stage = staged(comm, way, **options)
    images = torch.randn(EXAMPLES, 4, 8, 8)
    for _ in range(2):
        before = stage.bytes_sent
        stage.step(images if comm.rank == 0 else None, images if comm.rank == comm.size - 1 else None, range(EXAMPLES))
    few = EXAMPLES * 4 * (2 + 16) + MICRO_BATCHES * 64
    sent = tuple(now - earlier for now, earlier in zip(stage.bytes_sent, before, strict=True))
    assert sent == (few if comm.rank < comm.size - 1 else 0, few if comm.rank else 0)
    assert stage.stores_alike()
