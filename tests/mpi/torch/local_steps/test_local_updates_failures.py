"""State after a round that fails, and after gradients that are not finite, under "updates"."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, Marsit
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = few_ranks


def bad_step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
    """A step for which the last rank's gradient holds a NaN."""
    inputs, labels = batch(comm.rank, next(model.parameters()).dtype)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == comm.size - 1:
        (*_, last) = model.parameters()  # in the first bucket
        last.grad.view(-1)[0] = float("nan")
    optimizer.step()


@pytest.mark.parametrize(("local_steps", "dtype"), [(1, torch.bfloat16), (3, torch.float32)])
@pytest.mark.parametrize("algorithm", [Dense(), Marsit()], ids=["dense", "marsit"])
def test_ranks_are_equal_after_a_nan_and_go_on_with_a_restored_optimizer(
    comm: Communicator, algorithm: object, local_steps: int, dtype: torch.dtype
) -> None:
    model = make_model(dtype=dtype)
    optimizer = wrap(model, algorithm, comm, synchronize="updates", local_steps=local_steps)
    train(model, optimizer, comm, range(2 * local_steps))
    saved, common = copy.deepcopy(optimizer.state_dict()), parameters_of(model)
    train(model, optimizer, comm, range(local_steps - 1))
    with pytest.raises(NonFiniteGradient):
        bad_step(model, optimizer, comm)
    assert not optimizer.models_differ
    assert same_on_all_ranks(model, comm)
    assert torch.equal(parameters_of(model), common)
    optimizer.load_state_dict(saved)
    before = parameters_of(model)
    train(model, optimizer, comm, range(4 * local_steps))
    assert optimizer.synchronizations == 2 + 4
    assert same_on_all_ranks(model, comm)
    assert not torch.equal(parameters_of(model), before)


@pytest.mark.mpi(min_size=2)
def test_ranks_go_on_alike_after_a_mismatch(comm: Communicator) -> None:
    model, optimizer = wrapped(Marsit(), comm)
    train(model, optimizer, comm, range(2))
    branch = comm.barrier if comm.rank == 1 else partial(train, model, optimizer, comm, range(2, 3))
    with pytest.raises(CollectiveMismatch):
        branch()
    assert same_on_all_ranks(model, comm)
    train(model, optimizer, comm, range(3, 8))
    assert optimizer.synchronizations == 7
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize(
    ("inner", "local_steps", "dtype"),
    [
        ("momentum", 1, torch.bfloat16),
        ("momentum", 3, torch.float32),
        ("adam", 1, torch.float32),
        ("adam", 3, torch.bfloat16),
    ],
)
def test_a_skipped_step_leaves_no_trace(comm: Communicator, inner: str, local_steps: int, dtype: torch.dtype) -> None:
    models = [make_model(dtype=dtype), make_model(dtype=dtype)]
    for model, disturbed in zip(models, (False, True), strict=True):
        optimizer = wrap(model, Marsit(nonfinite="skip"), comm, inner, local_steps=local_steps)
        train(model, optimizer, comm, range(4))
        if disturbed:
            with pytest.warns(RuntimeWarning, match=rf"skipped.*the first of them rank {comm.size - 1}"):
                bad_step(model, optimizer, comm)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                bad_step(model, optimizer, comm)
            assert all(parameter.grad is None for parameter in model.parameters())
        train(model, optimizer, comm, range(4, 12))
        assert optimizer.synchronizations == 12 // local_steps
        assert all(aggregator.feedback.skipped == 0 for aggregator in optimizer.aggregators)
    assert torch.equal(*map(parameters_of, models))


def test_a_closure_and_a_sparse_gradient_can_be_skipped_too(comm: Communicator) -> None:
    embedding = nn.Embedding(7, 3, sparse=True)
    with torch.no_grad():
        embedding.weight.zero_()
    inner = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
    optimizer = DistributedOptimizer(inner, Marsit(nonfinite="skip"), comm)
    scale = float("inf") if comm.rank == 0 else 1.0

    def closure() -> float:
        optimizer.zero_grad()
        loss = embedding(torch.tensor([1, 2])).sum() * scale
        loss.backward()
        return 5.0

    with pytest.warns(RuntimeWarning, match="skipped"):
        assert optimizer.step(closure) == 5.0
    assert optimizer.synchronizations == 0
    assert not embedding.weight.any()
    scale = 1.0
    optimizer.step(closure)
    assert optimizer.synchronizations == 1
    assert embedding.weight.any()
