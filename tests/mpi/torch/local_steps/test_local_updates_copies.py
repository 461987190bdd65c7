"""Relay whose residual stays in the copy of the model, and the levels that gradients have."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpicomp
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.front_ends import algorithms_by_name
from mpicomp.torch.parameters import NamedParameter
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.training import make_model, parameters_of, same_on_all_ranks, train, wrapped

pytestmark = few_ranks
COPY = mpicomp.Relay(2, 64, residual="copy")


OWNERS = mpicomp.DoubleSqueeze("levels:levels=2,bucket=64", residual="copy")


def own_loop(
    comm: Communicator, method: Algorithm, model: nn.Module, lengths: list[int], rounds: int, local_steps: int
) -> Tensor:
    """Train the copy x - e by SGD with momentum, one vector of all tensors; return the common model."""
    common = parameters_of(model)
    unit = 64 if method.uses_tensor_lengths else 1
    starts = np.cumsum([0, *(-(-one // unit) * unit for one in lengths)])
    n = int(starts[-2]) + lengths[-1]
    relay = method.start(comm, n, tensor_lengths=lengths if method.uses_tensor_lengths else None)
    places = np.concatenate([np.arange(start, start + one) for start, one in zip(starts, lengths, strict=False)])
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(rounds):
        train(model, sgd, comm, range(number * local_steps, (number + 1) * local_steps))
        update = np.zeros(n, np.float32)
        update[places] = (common - parameters_of(model)).numpy()
        common = common - torch.from_numpy(relay.aggregate(update)[places])
        assert relay.residual is not None
        mine = common - torch.from_numpy(relay.residual[places])
        nn.utils.vector_to_parameters(mine, model.parameters())
    return common


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("method", [COPY, OWNERS], ids=["hops", "owners"])
def test_steps_equal_a_loop_that_subtracts_what_was_left_out(
    method: Algorithm, local_steps: int, overlap: bool, comm: Communicator
) -> None:
    model, plain = make_model(), make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    names = [name for name, _ in model.named_parameters()]
    optimizer = DistributedOptimizer(
        sgd, method, comm, model.named_parameters(), synchronize="updates", local_steps=local_steps, overlap=overlap
    )
    train(model, optimizer, comm, range(4 * local_steps))
    order = [names.index(name) for (bucket,) in [optimizer.buckets] for name in bucket]
    in_order = nn.ParameterList([list(plain.parameters())[place] for place in order])
    lengths = [one.numel() for one in in_order]
    common = own_loop(comm, method, _Ordered(plain, in_order), lengths, 4, local_steps)
    with optimizer.common_model():
        assert same_on_all_ranks(model, comm)
        found = torch.cat([list(model.parameters())[place].detach().reshape(-1) for place in order])
    assert torch.equal(found, common)
    assert torch.equal(parameters_of(model), parameters_of(plain))


class _Ordered(nn.Module):
    """A model whose parameters come in another order."""

    def __init__(self, model: nn.Module, ordered: nn.ParameterList) -> None:
        super().__init__()
        self.ordered, self._model = ordered, [model]  # in a list, so that the module does not list its parameters

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self._model[0](inputs)
        return found


def test_synchronize_leaves_the_common_model_on_all_ranks(comm: Communicator) -> None:
    model, optimizer = wrapped(COPY, comm, local_steps=2)
    train(model, optimizer, comm, range(5))
    assert comm.size == 1 or optimizer.models_differ
    optimizer.synchronize()
    assert not optimizer.models_differ
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("method", [COPY, OWNERS], ids=["hops", "owners"])
def test_a_training_that_is_resumed_goes_on_to_the_bit(method: Algorithm, comm: Communicator) -> None:
    model, optimizer = wrapped(method, comm, synchronize="updates", local_steps=2)
    train(model, optimizer, comm, range(4))
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm, range(4, 8))
    resumed, again = wrapped(method, comm, synchronize="updates", local_steps=2)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    train(resumed, again, comm, range(4, 8))
    assert torch.equal(parameters_of(resumed), parameters_of(model))
    with optimizer.common_model(), again.common_model():
        assert torch.equal(parameters_of(resumed), parameters_of(model))


def test_synchronize_leaves_the_errors_to_the_next_copies(comm: Communicator) -> None:
    model, optimizer = wrapped(COPY, comm, local_steps=2)
    train(model, optimizer, comm, range(4))
    optimizer.synchronize()  # right behind a round: nothing is sent
    assert optimizer.synchronizations == 2
    before, state = parameters_of(model), copy.deepcopy(optimizer.state_dict())
    resumed, again = wrapped(COPY, comm, local_steps=2)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(state)
    for one, of in ((model, optimizer), (resumed, again)):
        of.param_groups[0]["lr"] = 0.0  # only the errors are left to be sent
        train(one, of, comm, range(2))
    assert torch.equal(parameters_of(resumed), parameters_of(model))
    with optimizer.common_model():
        assert same_on_all_ranks(model, comm)
        assert comm.size == 1 or not torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("local_steps", [1, 2])
def test_other_methods_for_some_parameters_resume_to_the_bit(
    local_steps: int, overlap: bool, comm: Communicator
) -> None:
    some: Any = {"*bias": mpicomp.Dense(), "*": COPY}
    options: dict[str, Any] = {"synchronize": "updates", "local_steps": local_steps, "overlap": overlap}
    model, optimizer = wrapped(some, comm, **options)
    train(model, optimizer, comm, range(4))
    resumed, again = wrapped(some, comm, **options)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, of in ((model, optimizer), (resumed, again)):
        train(one, of, comm, range(4, 8))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


def test_frozen_parameters_stay_where_they_are_on_all_ranks(comm: Communicator) -> None:
    model, optimizer = wrapped(COPY, comm)
    train(model, optimizer, comm, range(3))
    model[2].weight.requires_grad_(False)
    train(model, optimizer, comm, range(3, 4))
    before = model[2].weight.detach().clone()
    train(model, optimizer, comm, range(4, 8))
    assert torch.equal(model[2].weight, before)
    with optimizer.common_model():
        assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"synchronize": "gradients"}, "gradients have no copy of the model"),
        ({"local_steps": 4, "delay": 1}, "cannot be combined with islands, delay or blend"),
        ({"local_steps": 4, "delay": 1, "blend": "steps"}, "cannot be combined with islands, delay or blend"),
        ({"local_steps": 4, "blend": 0.5}, "cannot be combined with islands, delay or blend"),
    ],
)
def test_options_without_a_copy_of_the_model_are_refused(
    options: dict[str, Any], words: str, comm: Communicator
) -> None:
    with pytest.raises(ValueError, match=words):
        wrapped(COPY, comm, **options)
    comm.barrier()


@pytest.mark.parametrize("wrapper", [mpicomp.PerNode, mpicomp.Auto])
def test_wrappers_which_do_not_see_the_copy_are_refused(wrapper: Any) -> None:
    with pytest.raises(ValueError, match="leaves its residual in the copy of the model"):
        wrapper(COPY)


def test_gradients_have_16_levels_unless_4_were_asked_for(comm: Communicator) -> None:
    found = []
    for algorithm in (mpicomp.Relay(), mpicomp.Relay(4), mpicomp.PerNode(mpicomp.Relay())):
        model, optimizer = wrapped(algorithm, comm, synchronize="gradients")
        train(model, optimizer, comm, range(1))
        (levels,) = {getattr(one.algorithm, "method", one.algorithm).levels for one in optimizer.aggregators}
        found.append(levels)
    assert found == [16, 4, 16]
    model, optimizer = wrapped(mpicomp.Relay(), comm)
    train(model, optimizer, comm, range(1))
    assert {one.algorithm.levels for one in optimizer.aggregators} == {4}


def test_hooks_send_16_levels() -> None:
    member = NamedParameter("weight", nn.Parameter(torch.ones(3)))
    assert algorithms_by_name(mpicomp.Relay(), [member]) == {"weight": mpicomp.Relay(16)}
    assert algorithms_by_name({"*": mpicomp.Relay(4)}, [member]) == {"weight": mpicomp.Relay(4)}


def test_traffic_is_that_of_all_buckets_and_of_both_phases_of_adam(comm: Communicator) -> None:
    model, optimizer = wrapped(mpicomp.Dense(), comm)
    assert optimizer.traffic.total.calls == 0
    train(model, optimizer, comm, range(3))
    if comm.size == 1:
        return  # which takes its gradients as they are
    buckets = len(optimizer.buckets)
    assert buckets > 1
    assert optimizer.traffic.last.calls == buckets
    assert optimizer.traffic.total.calls == 3 * buckets
    assert optimizer.traffic.total.bytes_sent == sum(one.traffic.total.bytes_sent for one in optimizer.aggregators)
    model = make_model()
    adam = mpicomp.torch.OneBitAdam(model.parameters(), warmup_steps=2, comm=comm)
    train(model, adam, comm, range(5))
    assert adam.traffic.total.calls == 5 * len(adam.aggregators)
    assert adam.traffic.last.calls == len(adam.aggregators)
