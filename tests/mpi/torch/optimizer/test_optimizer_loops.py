"""Shards of different lengths."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import CollectiveError, Communicator
from mpicomp import Dense, Marsit
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import TIMEOUT_S, few_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, wrap, wrapped

pytestmark = few_ranks


@pytest.mark.parametrize("longest", ["first", "last"])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(Dense(), {}), (Marsit(3), {}), (Marsit(3), {"local_steps": 2}), (Dense(), {"overlap": False})],
)
def test_ranks_without_batches_go_on_until_all_are_used_up(
    algorithm: Any, options: Any, longest: str, comm: Communicator
) -> None:
    model = make_model()
    optimizer = wrap(model, algorithm, comm, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    n_batches = 2 + 2 * (comm.rank if longest == "last" else comm.size - 1 - comm.rank)
    seen = 0
    for step in optimizer.join(range(n_batches), after_step=scheduler.step):
        inputs, labels = batch(1000 * comm.rank + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
        seen += 1
    assert seen == n_batches
    assert optimizer.synchronizations == 2 * comm.size // options.get("local_steps", 1)
    assert same_on_all_ranks(model, comm)


def test_a_rank_without_batches_counts_as_zeros(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = wrap(nn.ParameterList([parameter]), Dense(), comm)
    for _ in optimizer.join(range(1) if comm.rank == 0 else ()):
        parameter.sum().backward()
        optimizer.step()
    torch.testing.assert_close(parameters_of(nn.ParameterList([parameter])), torch.full((3,), -0.05 / comm.size))


@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_closures_may_be_passed_in_join(mode: str, comm: Communicator) -> None:
    results = []
    for has_closure in (False, True):
        model, optimizer = wrapped(Dense(), comm, synchronize=mode)
        for step in optimizer.join(range(2 + comm.rank)):
            inputs, labels = batch(1000 * comm.rank + step)

            def evaluate(model=model, optimizer=optimizer, inputs=inputs, labels=labels) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            if not has_closure:
                evaluate()
            optimizer.step(evaluate if has_closure else None)
        assert same_on_all_ranks(model, comm)
        results.append(parameters_of(model))
    assert torch.equal(*results)


def test_lbfgs_is_refused_in_join_where_ranks_without_batches_have_no_closure(comm: Communicator) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters()), Dense(), comm, synchronize="updates")
    with pytest.raises(TypeError, match=r"join: .* the closure that LBFGS needs"):
        next(optimizer.join(range(1 + comm.rank)))


class Twice(torch.optim.SGD):
    """An optimizer that takes gradients at two places, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("this optimizer needs a closure")
        closure()
        loss = closure()
        super().step()
        return loss


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_that_lacks_a_closure_in_join_ends_the_loop_on_all_ranks(comm: Communicator) -> None:
    weights = nn.Parameter(torch.ones(3))
    with comm.split(0) as own:
        optimizer = DistributedOptimizer(Twice([weights], lr=0.1), Dense(), own, synchronize="gradients")

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = weights.sum()
            loss.backward()
            return loss

        def loop() -> None:
            for _ in optimizer.join(range(int(own.rank == 0))):
                optimizer.step(evaluate)

        start = time.monotonic()
        with pytest.raises((RuntimeError, CollectiveError), match=r"needs a closure"):
            loop()
        assert time.monotonic() - start < TIMEOUT_S / 2
