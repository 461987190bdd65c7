"""Weights that stages share in pipelines side by side: averaged over the replicas, then summed over the stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp import QSGD, Dense
from mpicomp.pipeline import PipelineError, PipelineStage
from mpicomp.torch import DistributedOptimizer
from tests.mpi.pipeline.stages import EXAMPLES, MICRO_BATCHES, WIDTH

SYMBOLS, STEPS, LR = 9, 4, 0.5


class End(nn.Module):
    """The embedding of the first stage, or the output layer of the last one, which is the same matrix."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Parameter(torch.randn(SYMBOLS, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self._first = first

    def forward(self, given: Tensor) -> Tensor:
        if self._first:
            return torch.tanh(self.mix(nn.functional.embedding(given, self.shared)))
        return nn.functional.linear(torch.tanh(self.mix(given)), self.shared)


def symbols(replica: int, step: int) -> Tensor:
    return torch.randint(SYMBOLS, (EXAMPLES,), generator=torch.Generator().manual_seed(100 * replica + step))


def expected(replicas: int) -> Tensor:
    """Return the shared weight after the steps of one process with the batches of all replicas."""
    first, last = End(True), End(False)
    last.shared = first.shared
    whole = nn.Sequential(first, last)
    optimizer = torch.optim.SGD(whole.parameters(), LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            given = symbols(replica, step)
            (nn.functional.cross_entropy(whole(given), given) / replicas).backward()
        optimizer.step()
    return first.shared.detach()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_stages_that_load_states_of_different_steps_train_on(comm: Communicator) -> None:
    module: Any = End(first=comm.rank == 0)
    tied = {"embedding": module.shared} if comm.rank in (0, comm.size - 1) else None
    loss = nn.functional.cross_entropy if comm.rank == comm.size - 1 else None
    module = module if tied else nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(module, comm, MICRO_BATCHES, loss=loss, tied=tied)
    given = symbols(0, 0) if comm.rank == 0 else None, symbols(0, 0) if loss else None
    stage.step(*given)
    state = stage.state_dict()
    stage.load_state_dict(state | {"steps": 2} if comm.rank == 0 else state)
    stage.step(*given)
    stage.step(*given)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("algorithm", [Dense(), QSGD(levels=4)], ids=["dense", "qsgd"])
def test_both_ends_of_all_replicas_keep_the_same_bits(comm: Communicator, algorithm: Any) -> None:
    """With three replicas on seven ranks and more, whose sums depend on their order."""
    replicas = 2 if comm.size < 6 else 3
    members = comm.split(int(comm.rank < 2 * replicas))
    if comm.rank >= 2 * replicas:
        return
    with members.grid(replica=replicas, stage=2) as grid:
        stages, along = grid.along("stage"), grid.along("replica")
        first = stages.rank == 0
        module = End(first)
        stage = PipelineStage(
            module,
            stages,
            MICRO_BATCHES,
            loss=None if first else nn.functional.cross_entropy,
            tied={"embedding": module.shared},
            everyone=members,
        )
        optimizer = DistributedOptimizer(
            torch.optim.SGD(module.parameters(), LR),
            algorithm,
            along,
            module.named_parameters(),
            backward_passes_per_step=MICRO_BATCHES,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            given = symbols(along.rank, step)
            stage.step(given if first else None, None if first else given)
            optimizer.synchronize()
            stage.sum_tied_gradients()
            with optimizer.skip_synchronize():
                optimizer.step()
        if isinstance(algorithm, Dense):
            torch.testing.assert_close(module.shared.detach(), expected(replicas), rtol=0, atol=1e-5)
        held = members.allgather_object(module.shared.detach().numpy().tobytes())
        assert len(set(held)) == 1
        with pytest.raises(PipelineError, match=r"call sum_tied_gradients\(\) once after each synchronize"):
            stage.sum_tied_gradients()


@pytest.mark.mpi(min_size=4, max_size=4)
def test_sums_that_were_left_out_are_found_in_the_second_step(comm: Communicator) -> None:
    with comm.grid(replica=2, stage=2) as grid:
        stages, along = grid.along("stage"), grid.along("replica")
        first = stages.rank == 0
        module = End(first)
        loss = None if first else nn.functional.cross_entropy
        tied = {"embedding": module.shared}
        stage = PipelineStage(module, stages, MICRO_BATCHES, loss=loss, tied=tied, everyone=comm)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(module.parameters(), LR), Dense(), along, backward_passes_per_step=MICRO_BATCHES
        )
        given = symbols(along.rank, 0)
        stage.step(given if first else None, None if first else given)
        optimizer.step()
        with pytest.raises(PipelineError, match=r"call sum_tied_gradients\(\) between synchronize\(\)"):
            stage.step(given if first else None, None if first else given)
        optimizer.synchronize()


@pytest.mark.mpi(min_size=4, max_size=4)
def test_parameters_that_differ_in_one_pipeline_are_an_error_in_all_until_they_are_equal(comm: Communicator) -> None:
    with comm.grid(replica=2, stage=2) as grid:
        stages, along = grid.along("stage"), grid.along("replica")
        first = stages.rank == 0
        module = End(first)
        loss = None if first else nn.functional.cross_entropy
        tied = {"embedding": module.shared}
        stage = PipelineStage(module, stages, MICRO_BATCHES, loss=loss, tied=tied, everyone=comm)
        given = symbols(along.rank, 0)
        batch = given if first else None, None if first else given
        expected = stage.step(*batch)
        stage.sum_tied_gradients()
        kept = module.shared.detach().clone()
        with torch.no_grad():
            module.shared += float(first and along.rank == 0)
        found = "the tied parameter 'embedding' differs between the stages"
        for _ in range(2):
            with pytest.raises(PipelineError, match=f"pipeline of rank 0 failed.*{found}" if along.rank else found):
                stage.step(*batch)
        with torch.no_grad():
            module.shared.copy_(kept)
        assert stage.step(*batch) == pytest.approx(expected)
        assert stage.steps == 2


@pytest.mark.mpi(min_size=2, max_size=2)
def test_a_sum_that_a_step_has_made_is_not_made_again(comm: Communicator) -> None:
    module = End(comm.rank == 0)
    loss = nn.functional.cross_entropy if comm.rank else None
    stage = PipelineStage(module, comm, MICRO_BATCHES, loss=loss, tied={"embedding": module.shared})
    given = symbols(0, 0)
    stage.step(given if comm.rank == 0 else None, given if comm.rank else None)
    with pytest.raises(PipelineError, match="as the pipeline was made without everyone="):
        stage.sum_tied_gradients()
