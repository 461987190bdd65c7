"""Pipelines side by side whose gradients are averaged: their models, and a failure in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.communicator.splitting import Grid
from mpicomp import Dense, Marsit
from mpicomp.codecs import RowQuantizer
from mpicomp.pipeline import Action, Deltas, Direct, PipelineError, PipelineStage, gpipe
from mpicomp.torch import DistributedOptimizer, OneBitAdam
from tests.mpi.pipeline.stages import EXAMPLES, MICRO_BATCHES, WIDTH, layer

REPLICAS, STEPS, LR = 2, 4, 0.1

four_ranks = pytest.mark.mpi(min_size=4, max_size=4)


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step % 2)
    return torch.randn(EXAMPLES, WIDTH, generator=generator), torch.randn(EXAMPLES, WIDTH, generator=generator)


class Replica:
    """A stage of a pipeline, and the optimizer that averages with the same stage of others."""

    def __init__(self, comm: Communicator, grid: Grid, compressed: bool = False, **options: Any) -> None:
        stages, self.replicas = grid.along("stage"), grid.along("replica")
        self.first, self.last = stages.rank == 0, stages.rank == stages.size - 1
        self.module = layer(stages.rank)
        self.fails = False
        self.stage = PipelineStage(
            self.module,
            stages,
            MICRO_BATCHES,
            loss=self._loss if self.last else None,
            forward=Deltas(RowQuantizer(4), 2 * EXAMPLES) if compressed else None,
            backward=Direct(RowQuantizer(8)) if compressed else None,
            everyone=comm,
        )
        self.optimizer = self._optimizer(**options)

    def _loss(self, output: Tensor, targets: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("out of luck")
        return nn.functional.mse_loss(output, targets)

    def _optimizer(self, **options: Any) -> torch.optim.Optimizer:
        named = list(self.module.named_parameters())
        if options.get("bits"):
            return OneBitAdam(self.module.parameters(), 0.01, warmup_steps=2, comm=self.replicas, **options)
        inner = torch.optim.SGD(self.module.parameters(), lr=LR)
        algorithm = options.get("algorithm", Dense())
        return DistributedOptimizer(inner, algorithm, self.replicas, named, backward_passes_per_step=MICRO_BATCHES)

    def step(self, step: int, ids: Any = None, keep: bool = False) -> float:
        inputs, targets = batch(self.replicas.rank, step)
        if not keep:
            self.optimizer.zero_grad()
        loss = self.stage.step(
            inputs if self.first else None,
            targets if self.last else None,
            np.arange(EXAMPLES) + EXAMPLES * (step % 2) if ids is None else ids,
        )
        self.optimizer.step()
        return loss

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.module.parameters()])


@contextmanager
def replica(comm: Communicator, **options: Any) -> Iterator[Replica]:
    with comm.grid(replica=REPLICAS, stage=comm.size // REPLICAS) as grid:
        yield Replica(comm, grid, **options)


def expected_weights(stages: int, stage: int) -> Tensor:
    """Return a stage's weights after the steps of one process that has all stages and both batches."""
    model = nn.Sequential(*(layer(number) for number in range(stages)))
    for step in range(STEPS):
        sums = []
        for number in range(REPLICAS):
            model.zero_grad()
            for inputs, targets in zip(*(part.chunk(MICRO_BATCHES) for part in batch(number, step)), strict=True):
                torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets) / MICRO_BATCHES)
            sums.append([parameter.grad for parameter in model.parameters()])
        with torch.no_grad():
            for parameter, first, second in zip(model.parameters(), *sums, strict=True):
                assert first is not None
                assert second is not None
                parameter -= LR * ((first + second) / 2)
    return torch.cat([parameter.detach().flatten() for parameter in model[stage].parameters()])


@pytest.mark.mpi(min_size=4)
def test_replicas_train_as_one_process_with_all_their_batches_does(comm: Communicator) -> None:
    with replica(comm) as own:
        for step in range(STEPS):
            own.step(step)
        torch.testing.assert_close(
            own.weights(), expected_weights(comm.size // REPLICAS, own.stage.stage), rtol=0, atol=1e-6
        )


@four_ranks
@pytest.mark.parametrize("options", [{"bits": 4}, {"algorithm": Marsit(2)}])
def test_all_that_travels_may_be_compressed_and_replicas_stay_equal(comm: Communicator, options: Any) -> None:
    with replica(comm, compressed=True, **options) as own:
        losses = [own.step(step) for step in range(12)]
        both = own.replicas.allgather_object(own.weights().numpy().tobytes())
        assert len(set(both)) == 1
        assert np.mean(losses[-2:]) < np.mean(losses[:2])
        assert own.stage.stores_alike()


@four_ranks
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_in_one_pipeline_is_an_error_in_all_and_the_step_can_be_repeated(
    comm: Communicator, failing: int
) -> None:
    with replica(comm) as own:
        for step in range(STEPS):
            if step == failing:
                own.fails = own.replicas.rank == 1
                with pytest.raises(PipelineError, match="RuntimeError: out of luck"):
                    own.step(step)
                own.fails = False
                own.optimizer.synchronize()  # ends what backward has begun
            own.step(step)
        torch.testing.assert_close(own.weights(), expected_weights(2, own.stage.stage), rtol=0, atol=1e-6)


@four_ranks
def test_a_pipeline_that_cannot_begin_keeps_the_others_from_it(comm: Communicator) -> None:
    with replica(comm, compressed=True) as own:
        wrong = np.full(EXAMPLES, 3) if own.replicas.rank == 0 else None
        told = (
            "id 3 occurs" if own.replicas.rank == 0 else "the pipeline of rank 0 failed, and so this one does: .*id 3"
        )
        with pytest.raises(PipelineError, match=told):
            own.step(0, wrong)
        own.optimizer.synchronize()
        assert own.step(0) > 0


@four_ranks
@pytest.mark.parametrize("failing_stages", [{0}, {0, 1}], ids=["one stage", "all stages"])
def test_a_schedule_that_fails_for_a_smaller_batch_of_one_pipeline_is_an_error_in_all(
    comm: Communicator, failing_stages: set[int]
) -> None:
    with comm.grid(replica=REPLICAS, stage=2) as grid:
        stages, own = grid.along("stage"), grid.along("replica").rank

        def of_whole_batches(stage: int, count: int, micro_batches: int) -> tuple[Action, ...]:
            if micro_batches < MICRO_BATCHES and stages.rank in failing_stages:
                raise KeyError(micro_batches)
            return gpipe(stage, count, micro_batches)

        loss = nn.functional.mse_loss if stages.rank else None
        stage = PipelineStage(
            layer(stages.rank), stages, MICRO_BATCHES, loss=loss, schedule=of_whole_batches, everyone=comm
        )
        inputs, targets = batch(own, 0)
        for size in (2, EXAMPLES, 2):
            taken = EXAMPLES if own else size
            given = None if stages.rank else inputs[:taken], targets[:taken] if stages.rank else None
            if size == EXAMPLES:
                assert stage.step(*given) > 0
                continue
            with pytest.raises(PipelineError, match="the step was not begun: stage 0: KeyError: 2") as error:
                stage.step(*given)
            assert isinstance(error.value.__cause__, KeyError) == (own == 0 and stages.rank in failing_stages)


@four_ranks
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_step_can_be_repeated_though_gradients_were_set_to_zero(comm: Communicator, failing: int, bits: int) -> None:
    found = []
    for fails in (False, True):
        with replica(comm, bits=bits) as own:
            for step in range(STEPS):
                own.optimizer.zero_grad(set_to_none=False)
                if fails and step == failing:
                    own.fails = own.replicas.rank == 1
                    with pytest.raises(PipelineError, match="RuntimeError: out of luck"):
                        own.step(step, keep=True)
                    own.fails = False
                    if not bits:
                        own.optimizer.synchronize()
                        own.optimizer.zero_grad(set_to_none=False)
                own.step(step, keep=True)
            found.append(own.weights())
    assert torch.equal(*found)


@four_ranks
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("axes", ["replica first", "stage first"])
def test_pipelines_side_by_side_round_independently_under_one_seed(
    comm: Communicator, direction: str, axes: str
) -> None:
    order = ("replica", "stage") if axes == "replica first" else ("stage", "replica")
    with comm.grid(**dict.fromkeys(order, REPLICAS)) as grid:
        stages = grid.along("stage")
        last = stages.rank == 1
        module = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            module.weight.copy_(torch.eye(WIDTH))
            module.bias.zero_()
        options: dict[str, Any] = {direction: Direct(RowQuantizer(4, "stochastic"))}
        stage = PipelineStage(module, stages, 1, loss=nn.functional.mse_loss if last else None, **options)
        inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
        arrived: list[Tensor] = []
        module.register_forward_pre_hook(lambda _, given: arrived.append(given[0].detach()))
        module.register_forward_hook(lambda _, __, output: _add_hook(output, arrived))
        stage.step(None if last else inputs, torch.zeros(64, WIDTH) if last else None)
        errors = arrived[0] - inputs if direction == "forward" else arrived[-1] - inputs / (32 * WIDTH)
        mine = errors.flatten().numpy()
        everyones = grid.along("replica").allgather_object(mine)
        if last == (direction == "forward"):
            assert np.abs(mine).max() > 0
            assert abs(np.corrcoef(everyones)[0, 1]) < 0.2


@four_ranks
@pytest.mark.parametrize("examples", [EXAMPLES - 1, MICRO_BATCHES - 1])
def test_replicas_train_with_a_smaller_batch_on_one_of_them(comm: Communicator, examples: int) -> None:
    with replica(comm) as own:
        inputs, targets = batch(own.replicas.rank, 0)
        taken = examples if own.replicas.rank else EXAMPLES
        for _ in range(2):
            own.optimizer.zero_grad()
            own.stage.step(inputs[:taken] if own.first else None, targets[:taken] if own.last else None)
            own.optimizer.step()
        model = nn.Sequential(*(layer(number) for number in range(2)))
        for _ in range(2):
            model.zero_grad()
            for number, size in ((0, EXAMPLES), (1, examples)):
                inputs, targets = batch(number, 0)
                torch.autograd.backward(nn.functional.mse_loss(model(inputs[:size]), targets[:size]) / REPLICAS)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= LR * parameter.grad
        expected = torch.cat([one.detach().flatten() for one in model[own.stage.stage].parameters()])
        torch.testing.assert_close(own.weights(), expected, rtol=0, atol=1e-6)


def _add_hook(output: Tensor, arrived: list[Tensor]) -> None:
    """Have the gradient of an output listed when it comes."""
    output.register_hook(arrived.append)
