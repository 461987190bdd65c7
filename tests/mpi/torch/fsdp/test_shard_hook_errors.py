"""The hook for FSDP2: wrong arguments and failing steps are errors on all ranks, and nothing is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module

from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, EFSignSGD, Marsit, PerNode
from mpicomp.torch import fsdp_hook
from mpicomp.torch.fsdp.parameter_groups import ParameterGroup, parameter_groups
from tests.mpi.lanes import TIMEOUT_S
from tests.mpi.torch.fsdp.sharded_models import Cluster, Transformer, loss_of, parameters_of, sgd, shard, train
from tests.mpi.torch.training import has_grad_dtype

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)

CHANGED = r"its parameters were frozen, unfrozen or converted since: call hook.remove\(\), then fsdp_hook again"


def unhooked(model: nn.Module) -> bool:
    return not any(group.has_hook for group in parameter_groups(model))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (lambda nodes, model: ("marsit", nodes.across, model), TypeError, r"the algorithm is text, 'marsit'"),
        (lambda nodes, model: (Dense(), nodes.world.mpi_comm, model), TypeError, r"wrap it: Communicator\(mpi_comm\)"),
        (
            lambda nodes, model: (Dense(), nodes.across, nn.Linear(2, 2)),
            ValueError,
            r"no module of the Linear is shard",
        ),
        (
            lambda nodes, model: (Dense(), nodes.across, model.parameters()),
            TypeError,
            r"the model is a generator; pass",
        ),
        (
            lambda nodes, model: (PerNode(Dense()), nodes.across, model),
            ValueError,
            r"sums within nodes.* Dense\(\)",
        ),
        (lambda nodes, model: ({"*bias": Dense()}, nodes.across, model), ValueError, r"no pattern among '\*bias' fits"),
    ],
    ids=["text", "MPI's communicator", "not sharded", "parameters", "per node", "no pattern"],
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(
    arguments: Callable[[Cluster, nn.Module], Any], kind: type[Exception], message: str, nodes: Cluster
) -> None:
    model = shard(Transformer(), nodes.shards)
    mine = nodes.world.rank == 2
    with pytest.raises(kind if mine else CollectiveMismatch, match=message):
        fsdp_hook(*(arguments(nodes, model) if mine else (Dense(), nodes.across, model)))
    assert unhooked(model)
    fsdp_hook(Dense(), nodes.across, model)
    train(model, sgd(model), range(1))


def test_native_hsdp_is_refused(nodes: Cluster) -> None:
    with pytest.raises(ValueError, match=r'sharded over a mesh of two dimensions.*mesh=mesh\["shard"\]'):
        fsdp_hook(Dense(), nodes.across, shard(Transformer(), nodes.mesh))


def test_modules_of_different_meshes_are_refused(nodes: Cluster) -> None:
    model = Transformer()
    fully_shard(model.blocks[0], mesh=nodes.mesh["node"])
    fully_shard(model, mesh=nodes.shards)
    with pytest.raises(ValueError, match=r"module 'blocks.0' is sharded over ranks .*; give fully_shard the same mesh"):
        fsdp_hook(Dense(), nodes.across, model)


@pytest.mark.parametrize("level", ["world", "local"])
def test_another_communicator_is_refused(level: str, nodes: Cluster) -> None:
    choice = nodes.world if level == "world" else nodes.nodes.local
    message = (
        "the communicator of rank 0, which holds shard 0, has rank 1, which does not; pass the communicator of ranks"
    )
    model = shard(Transformer(), nodes.shards)
    with pytest.raises(ValueError, match=message):
        fsdp_hook(Dense(), choice, model)
    assert unhooked(model)


def test_a_mesh_that_does_not_match_the_nodes_is_refused(nodes: Cluster) -> None:
    """Gradients of ranks 0 and 2 would never meet those of ranks 1 and 3, whose models would go their own way."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("node", "shard"))
    model = shard(Transformer(), mesh["shard"])
    message = r"has 4 groups of 1 ranks, of which the communicator of rank 0 joins 2: the mesh does not match the nodes"
    with pytest.raises(ValueError, match=message):
        fsdp_hook(Dense(), nodes.across, model)
    assert unhooked(model)


def test_models_on_different_kinds_of_devices_are_refused(nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shard(Transformer(), nodes.shards)
    if nodes.world.rank == 3:
        monkeypatch.setattr(ParameterGroup, "device", torch.device("cuda", 0))
    message = r"ranks 0 and 3 differ in their arguments: .* on cpu in .* on cuda in .*; make the same call on all ranks"
    with pytest.raises(CollectiveMismatch, match=message):
        fsdp_hook(Dense(), nodes.across, model)
    assert unhooked(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_residuals_in_16_bits_are_refused(dtype: torch.dtype, nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook(EFSignSGD(), nodes.across, model)
    train(model, sgd(model), range(1))
    state = hook.state_dict()
    mine = nodes.world.rank == 1
    narrow = {key: one.to(dtype) if key.startswith("residual/") else one for key, one in state.items()}
    message = rf"the state's residual/\S+ is {str(dtype).partition('.')[2]}, and residuals are float32, also of models"
    with pytest.raises(ValueError if mine else CollectiveMismatch, match=message):
        hook.load_state_dict(narrow if mine else state)
    hook.load_state_dict(state)


def test_communicators_in_another_order_of_nodes_are_refused(nodes: Cluster) -> None:
    world = nodes.world
    with world.split(world.rank % 2, -world.rank if world.rank % 2 else world.rank) as across:
        model = shard(Transformer(), nodes.shards)
        with pytest.raises(ValueError, match=r"the communicators of ranks 0 and 1, of one node, join other nodes"):
            fsdp_hook(Dense(), across, model)


def test_a_second_hook_is_refused_until_the_first_is_removed(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook(Marsit(), nodes.across, model)
    with pytest.raises(ValueError, match=r"module 'blocks.0' has an all-reduce hook already|the model itself has"):
        fsdp_hook(Marsit(), nodes.across, model)
    hook.remove()
    fsdp_hook(Marsit(), nodes.across, model)


@has_grad_dtype
def test_gradients_of_another_type_than_their_parameter_are_refused_by_name(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    for one in model.parameters():
        one.grad_dtype = torch.float64
    with pytest.raises(ValueError, match=r"parameter .* is of torch.float32 and its gradient of torch.float64"):
        fsdp_hook(Dense(), nodes.across, model)


def test_other_algorithms_on_a_rank_are_refused(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    with pytest.raises(CollectiveMismatch, match=r"ranks 0 and 3 differ in their arguments: .*seed=0.* and .*seed=1"):
        fsdp_hook(Marsit(seed=nodes.world.rank // 3), nodes.across, model)


def test_parameters_of_tensor_parallelism_are_refused(nodes: Cluster) -> None:
    model = distribute_module(nn.Linear(4, 4), nodes.mesh["node"])
    fully_shard(model, mesh=nodes.shards)
    with pytest.raises(ValueError, match=r"parameter 'weight' was a DTensor before fully_shard"):
        fsdp_hook(Dense(), nodes.across, model)


def test_shards_that_differ_between_nodes_are_an_error_in_the_first_backward(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    fsdp_hook(Dense(), nodes.across, model)
    with torch.no_grad():
        model.head.bias.to_local().add_(nodes.nodes.node)  # type: ignore[union-attr]
    with pytest.raises(CollectiveMismatch, match=r"first of which is 'head.bias'.*build the model from the same seed"):
        loss_of(model, 0, 0).backward()


def test_a_parameter_that_is_frozen_afterwards_is_an_error(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook(Dense(), nodes.across, model)
    model.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="the model itself has 2 parameters to train, and had 3; " + CHANGED):
        loss_of(model, 0, 0).backward()
    hook.remove()
    hook = fsdp_hook(Dense(), nodes.across, model)
    train(model, sgd(model), range(1))
    assert "head.weight" not in hook.buckets[0]


def test_a_parameter_that_one_node_freezes_is_an_error_on_all(nodes: Cluster) -> None:
    model = shard(Transformer(), nodes.shards)
    fsdp_hook(Dense(), nodes.across, model)
    mine = nodes.nodes.node == 1
    if mine:
        model.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(ValueError if mine else CollectiveMismatch, match=CHANGED):
        loss_of(model, 0, 0).backward()


@pytest.mark.parametrize("on_nodes", [(0, 1), (1,)], ids=["all nodes", "one node"])
@pytest.mark.parametrize("block", [0, 1])
def test_a_module_that_is_unfrozen_afterwards_is_an_error_on_all_nodes(
    block: int, on_nodes: tuple[int, ...], nodes: Cluster
) -> None:
    model = Transformer()
    model.blocks[block].requires_grad_(False)
    shard(model, nodes.shards)
    hook = fsdp_hook(Dense(), nodes.across, model)
    train(model, sgd(model), range(2))
    assert len(hook.buckets) == 2
    mine = nodes.nodes.node in on_nodes
    if mine:
        model.blocks[block].requires_grad_(True)
    start = time.perf_counter()
    with pytest.raises(ValueError if mine else CollectiveMismatch, match=CHANGED):
        loss_of(model, 0, 0).backward()
    assert time.perf_counter() - start < TIMEOUT_S / 2
    if len(on_nodes) == 2:
        hook.remove()
        hook = fsdp_hook(Dense(), nodes.across, model)
        train(model, sgd(model), range(2, 4))
        assert len(hook.buckets) == 3
        of_nodes = nodes.across.allgather_object(parameters_of(model))
        assert torch.equal(*of_nodes)


def test_a_module_that_is_unfrozen_while_all_others_are_frozen_is_an_error(nodes: Cluster) -> None:
    model = Transformer()
    model.blocks[0].requires_grad_(False)
    shard(model, nodes.shards)
    fsdp_hook(Dense(), nodes.across, model)
    model.requires_grad_(False)
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ValueError, match=CHANGED):
        loss_of(model, 0, 0).backward()


def test_modules_may_be_frozen_in_turns(nodes: Cluster) -> None:
    """Train as an adversarial model, of which one half is frozen in each step."""
    model = shard(Transformer(), nodes.shards)
    fsdp_hook(Dense(), nodes.across, model)
    optimizer = sgd(model)
    for step in range(4):
        model.blocks[0].requires_grad_(step % 2 == 0)  # type: ignore[index]
        train(model, optimizer, range(step, step + 1))
    assert torch.equal(*nodes.across.allgather_object(parameters_of(model)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("forwards", [0, 1])
def test_a_part_of_a_model_is_refused_by_name(forwards: int, frozen: bool, nodes: Cluster) -> None:
    model = Transformer()
    model.blocks[0].requires_grad_(not frozen)
    shard(model, nodes.shards)
    for _ in range(forwards):
        loss_of(model, 0, 0)

    def hook_and_train() -> None:
        fsdp_hook(Dense(), nodes.across, model.blocks[1])
        loss_of(model, 0, 0).backward()

    with pytest.raises(ValueError, match=r"a part of the model: its outermost module has none.*pass the whole model"):
        hook_and_train()


def test_two_hooks_may_cover_the_halves_of_a_model(nodes: Cluster) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for half in model:
        shard(half, nodes.shards)
        fsdp_hook(Dense(), nodes.across, half)
    fully_shard(model, mesh=nodes.shards)
    model(torch.full((2, 4), 0.1 * nodes.world.rank)).square().sum().backward()
    gradients = torch.cat([one.grad.to_local().flatten() for one in model.parameters()])
    assert torch.equal(*nodes.across.allgather_object(gradients))


def test_frozen_modules_may_be_sharded_otherwise(nodes: Cluster) -> None:
    model = Transformer()
    model.blocks[0].requires_grad_(False)
    fully_shard(model.blocks[0], mesh=nodes.mesh)
    fully_shard(model, mesh=nodes.shards)
    fsdp_hook(Dense(), nodes.across, model)
    train(model, sgd(model), range(2))
    assert torch.equal(*nodes.across.allgather_object(parameters_of(model)))


def test_shards_that_are_cut_otherwise_on_a_node_are_an_error(nodes: Cluster) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=nodes.shards, shard_placement_fn=lambda one: Shard(nodes.nodes.node * (one.ndim - 1)))
    with pytest.raises(CollectiveMismatch, match=r"ranks 0 and 2 differ in their arguments"):
        fsdp_hook(Dense(), nodes.across, model)


@pytest.mark.parametrize("form", [Dense(), EFSignSGD()], ids=str)
def test_training_goes_on_after_nan_on_one_rank(form: Any, nodes: Cluster) -> None:
    model, other = (shard(Transformer(), nodes.shards) for _ in range(2))
    hook = fsdp_hook(form, nodes.across, model)
    optimizer = sgd(model)
    train(model, optimizer, range(2))
    before = parameters_of(model)
    optimizer.zero_grad()
    loss = loss_of(model, nodes.world.rank, 2)
    with pytest.raises(NonFiniteGradient) as caught:
        (loss * float("nan") if nodes.world.rank == 3 else loss).backward()
    assert caught.value.ranks == (1,)  # the node
    assert all(one.grad.to_local().isnan().all() for one in model.parameters() if one.grad.to_local().numel())
    assert torch.equal(parameters_of(model), before)
    train(model, optimizer, range(2, 4))
    untouched, its_optimizer = fsdp_hook(form, nodes.across, other), sgd(other)
    train(other, its_optimizer, range(4))
    assert torch.equal(parameters_of(model), parameters_of(other))
    assert [one.step for one in hook.aggregators] == [one.step for one in untouched.aggregators]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: 3, r"the state is 3; load a result of state_dict"),
        (lambda state: {**state, "description": "x"}, r"the state's description is damaged"),
        (
            lambda state: {k: v for k, v in state.items() if k != "residual/head.bias"},
            r"has no tensor 'residual/head.b",
        ),
        (
            lambda state: {**state, "description": re.sub(r'"nodes": 2', '"nodes": 3', state["description"])},
            r"the state is of 3 nodes of 2 ranks, and here are 2 of 2; load it by load_checkpoint",
        ),
        (
            lambda state: {**state, "description": state["description"].replace("head.bias", "tail.bias")},
            r"the state is of other vectors: .*shard the same model in the same way",
        ),
    ],
    ids=["no state", "damaged", "lacks a tensor", "other nodes", "other names"],
)
def test_a_state_that_does_not_fit_is_an_error_on_all_ranks(
    change: Callable[[Any], Any], message: str, nodes: Cluster
) -> None:
    model = shard(Transformer(), nodes.shards)
    hook = fsdp_hook(EFSignSGD(), nodes.across, model)
    train(model, sgd(model), range(2))
    state = hook.state_dict()
    train(model, sgd(model), range(2))
    mine = nodes.world.rank == 1
    with pytest.raises(ValueError if mine else CollectiveMismatch, match=message):
        hook.load_state_dict(change(state) if mine else state)
    assert {one.step for one in hook.aggregators} == {4}
    hook.load_state_dict(state)
    assert {one.step for one in hook.aggregators} == {2}


def test_a_checkpoint_without_the_state_is_an_error(nodes: Cluster, folder: Path) -> None:
    hook = fsdp_hook(EFSignSGD(), nodes.across, shard(Transformer(), nodes.shards))
    with pytest.raises(ValueError, match=r"is not a checkpoint that can be read"):
        hook.load_checkpoint(folder / "nothing")
    dcp.save({"hook": hook}, checkpoint_id=folder / "checkpoint")
    with pytest.raises(ValueError, match=r"has no state of a hook under 'fsdp'; pass the key that it was saved by"):
        hook.load_checkpoint(folder / "checkpoint", "fsdp")


def test_unused_modules_and_modules_used_twice(nodes: Cluster) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
            for k in chosen:
                x = self.blocks[k](x).tanh()
            return x

    native, model = shard(Twice(), nodes.mesh), shard(Twice(), nodes.shards)
    native.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    fsdp_hook(Dense(), nodes.across, model)
    for step, chosen in enumerate([[0, 1, 0], [0, 1]]):
        for one in native, model:
            inputs = torch.full((2, 5), 0.1 * (nodes.world.rank + step))
            one(inputs, chosen).square().sum().backward()
        for mine, theirs in zip(model.parameters(), native.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local())


def test_without_a_process_group(nodes: Cluster) -> None:
    model = shard(Transformer(), init_device_mesh("cpu", (4,)))
    group, dist.distributed_c10d.GroupMember.WORLD = dist.distributed_c10d.GroupMember.WORLD, None
    try:
        with pytest.raises(ValueError, match=r"fsdp_hook: torch.distributed has no process group"):
            fsdp_hook(Dense(), nodes.across, model)
    finally:
        dist.distributed_c10d.GroupMember.WORLD = group
