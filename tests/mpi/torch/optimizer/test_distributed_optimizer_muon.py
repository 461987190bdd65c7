"""Muon, an optimizer of matrices: against one process that makes its steps by hand, and together with AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp import Dense, Marsit, Relay, SparseLoCo
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import few_ranks, up_to_four_ranks
from tests.mpi.torch.training import batch, make_model, on_all_ranks, parameters_of, same_on_all_ranks, train

pytestmark = [
    few_ranks,
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is PyTorch 2.9's"),
]

MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.dim() == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.dim() != 2]


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest."""
    return [torch.optim.Muon(matrices(model), **MUON), torch.optim.AdamW(rest(model), lr=0.005)]


def distributed(model: nn.Module, comm: Communicator, algorithms: list[Any], **options: Any) -> list[Any]:
    """Both optimizers over the ranks, each by an algorithm of its own seed."""
    named = list(model.named_parameters())
    return [
        DistributedOptimizer(one, algorithm, comm, named, bucket_mb=0.001, **options)
        for one, algorithm in zip(both(model), algorithms, strict=True)
    ]


def backward(model: nn.Module, seed: int, share: float = 1.0) -> None:
    inputs, labels = batch(seed)
    (share * nn.functional.cross_entropy(model(inputs), labels)).backward()


def step_of(model: nn.Module, optimizers: list[Any], seeds: list[int], share: float = 1.0) -> None:
    """One step of all optimizers, with the gradients of the batches of these seeds added up."""
    for one in optimizers:
        one.zero_grad()
    for seed in seeds:
        backward(model, seed, share)
    for one in optimizers:
        one.step()


DENSE = [Dense(), Dense()]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def test_averaged_gradients_are_those_of_one_process(passes: int, overlap: bool, comm: Communicator) -> None:
    model, alone = make_model(), make_model()
    optimizers = distributed(
        model, comm, DENSE, synchronize="gradients", backward_passes_per_step=passes, overlap=overlap
    )
    by_hand = both(alone)
    for step in range(6):
        own = [1000 * comm.rank + 10 * step + one for one in range(passes)]
        everywhere = [1000 * rank + 10 * step + one for rank in range(comm.size) for one in range(passes)]
        step_of(model, optimizers, own)
        step_of(alone, by_hand, everywhere, 1 / comm.size)
        torch.testing.assert_close(parameters_of(model), parameters_of(alone), rtol=1e-3, atol=1e-4)
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("outer", [None, (0.7, 0.9)], ids=["without momentum", "MuLoCo"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_local_steps_are_those_of_the_rule(local_steps: int, outer: Any, comm: Communicator) -> None:
    """H steps of Muon on each rank, and one outer Nesterov step with the mean of the updates."""
    model, alone = make_model(), make_model()
    optimizers = distributed(model, comm, DENSE, synchronize="updates", local_steps=local_steps, outer=outer)
    by_hand, (eta, mu) = both(alone), outer or (1.0, 0.0)
    common, momentum = parameters_of(alone), torch.zeros_like(parameters_of(alone))
    for step in range(3 * local_steps + 1):
        step_of(model, optimizers, [1000 * comm.rank + step])
        step_of(alone, by_hand, [1000 * comm.rank + step])
        if (step + 1) % local_steps == 0:
            mean = torch.stack(on_all_ranks(common - parameters_of(alone), comm)).mean(0)
            momentum = mu * momentum + mean
            common = common - eta * (mean + mu * momentum)
            nn.utils.vector_to_parameters(common.clone(), alone.parameters())
        torch.testing.assert_close(parameters_of(model), parameters_of(alone), rtol=1e-3, atol=1e-4)


def test_updates_during_backward_are_those_after_it(comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, overlap in zip(models, (False, True), strict=True):
        optimizers = distributed(model, comm, DENSE, synchronize="updates", local_steps=2, overlap=overlap)
        for step in range(6):
            step_of(model, optimizers, [1000 * comm.rank + step])
    torch.testing.assert_close(*map(parameters_of, models))


@up_to_four_ranks
@pytest.mark.parametrize("algorithm", [Dense(), Relay()], ids=str)
def test_islands_train_as_one_rank_on_the_gradients_of_theirs(algorithm: Any, comm: Communicator) -> None:
    model, alone = make_model(), make_model()
    with comm.split(comm.rank // 2) as island:
        muon = torch.optim.Muon(matrices(model), **MUON)
        optimizer = DistributedOptimizer(
            muon, algorithm, comm, synchronize="updates", local_steps=2, islands=island, outer=(0.7, 0.6)
        )
        by_hand = torch.optim.Muon(matrices(alone), **MUON)
        seeds = [1000 * rank for rank in range(comm.size) if rank // 2 == comm.rank // 2]
        step_of(model, [optimizer], [1000 * comm.rank])
        step_of(alone, [by_hand], seeds, 1 / len(seeds))
        torch.testing.assert_close(parameters_of(model), parameters_of(alone), rtol=1e-3, atol=1e-4)
        for step in range(1, 6):
            step_of(model, [optimizer], [1000 * comm.rank + step])
            assert same_on_all_ranks(model, island)
        assert same_on_all_ranks(model, comm)


CARRIERS: dict[str, list[Any]] = {
    "marsit": [Marsit(10, seed=0), Marsit(10, seed=1)],
    "relay": [Relay(), Relay()],
    "sparse_loco": [SparseLoCo(16, 64), SparseLoCo(16, 64)],
}


@pytest.mark.parametrize("plan", [{"local_steps": 1}, {"local_steps": 4, "outer": (0.7, 0.9)}], ids=str)
@pytest.mark.parametrize("algorithms", CARRIERS.values(), ids=CARRIERS)
def test_compressed_updates_train_and_resume_to_the_bit(algorithms: Any, plan: Any, comm: Communicator) -> None:
    model = make_model()
    optimizers = distributed(model, comm, algorithms, **plan)

    def loss() -> float:
        inputs, labels = batch(5)
        with torch.no_grad():
            return nn.functional.cross_entropy(model(inputs), labels).item()

    before = loss()
    for step in range(21):
        step_of(model, optimizers, [1000 * comm.rank + step])
    saved = copy.deepcopy(model.state_dict()), [copy.deepcopy(one.state_dict()) for one in optimizers]
    for step in range(21, 24):
        step_of(model, optimizers, [1000 * comm.rank + step])
    assert loss() < 0.8 * before
    resumed = make_model(seed=5)
    again = distributed(resumed, comm, algorithms, **plan)
    resumed.load_state_dict(saved[0])
    for one, state in zip(again, saved[1], strict=True):
        one.load_state_dict(state)
    for step in range(21, 24):
        step_of(resumed, again, [1000 * comm.rank + step])
    assert torch.equal(parameters_of(resumed), parameters_of(model))
    assert same_on_all_ranks(model, comm)


def test_sixteen_bit_matrices_are_moved_as_float32(comm: Communicator) -> None:
    model = make_model(dtype=torch.bfloat16)
    muon = torch.optim.Muon(matrices(model), **MUON)
    optimizer = DistributedOptimizer(muon, Relay(), comm)
    before: Tensor = parameters_of(model)
    train(model, optimizer, comm, range(5))
    assert same_on_all_ranks(model, comm)
    assert not torch.equal(parameters_of(model), before)
    assert all(one.dtype == torch.float32 for one in muon.param_groups[0]["params"])
