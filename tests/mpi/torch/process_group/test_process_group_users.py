"""PyTorch on top of process groups: DDP, FSDP2, DTensor, functional collectives and distributed checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense
from mpicomp.torch import ddp_hook

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.mpi(max_size=4)]

STEPS, ROWS = 3, 12


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def train(model: nn.Module, rows: slice) -> nn.Module:
    """Train on rows of a common batch, with the mean over all of it as loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chance = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(ROWS, 6, generator=chance)[rows]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def own_rows() -> slice:
    share = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def test_ddp_trains_as_with_gloo_and_as_one_process() -> None:
    gloo = dist.new_group(backend="gloo")
    ours, theirs = (
        train(DistributedDataParallel(make_model(), process_group=group, bucket_cap_mb=0.001), own_rows())
        for group in (None, gloo)
    )
    torch.testing.assert_close(parameters(ours), parameters(theirs))
    torch.testing.assert_close(parameters(ours), parameters(train(make_model(), slice(None))))


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
def test_ddp_with_hooks(hook: Callable[..., Any]) -> None:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, hook)
    train(model, own_rows())
    torch.testing.assert_close(parameters(model), parameters(train(make_model(), slice(None))), rtol=1e-2, atol=1e-3)


def test_ddp_with_a_hook_that_waits_for_calls_in_callbacks() -> None:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    train(model, own_rows())
    for parameter in parameters(model):
        mine = parameter.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(parameter, mine)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_ddp_with_our_own_hook(options: dict[str, bool], comm: Communicator) -> None:
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.001, **options)
    state, hook = ddp_hook(Dense(), comm, model)
    model.register_comm_hook(state, hook)
    train(model, own_rows())
    assert len(state.aggregators) > 1
    torch.testing.assert_close(parameters(model), parameters(train(make_model(), slice(None))))


def test_ddp_with_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True))
    wrapped = DistributedDataParallel(model)
    rank = dist.get_rank()
    wrapped(torch.tensor([rank, 9])).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    expected = torch.zeros(10, 3)
    expected[: dist.get_world_size()] = 1 / dist.get_world_size()
    expected[9] = 1
    torch.testing.assert_close(gradient.to_dense(), expected)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_fsdp_trains_as_one_process(precision: torch.dtype) -> None:
    model = make_model()
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=precision)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    train(model, own_rows())
    close = {} if precision == torch.float32 else {"rtol": 0.1, "atol": 0.02}
    torch.testing.assert_close(parameters(model), parameters(train(make_model(), slice(None))), **close)


def test_tensors_are_distributed_and_redistributed() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(7 * 5)).view(7, 5)  # uneven shards
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), whole)
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = columns @ distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    assert isinstance(product.placements[0], Partial)
    torch.testing.assert_close(product.redistribute(mesh, [Shard(0)]).full_tensor(), whole @ torch.ones(5, 2))


@pytest.mark.mpi(min_size=4)
def test_a_mesh_of_two_dimensions_replicates_and_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    train(model, own_rows())
    torch.testing.assert_close(parameters(model), parameters(train(make_model(), slice(None))))


def test_functional_collectives() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    x = torch.full((2, 3), float(rank))
    assert torch.equal(functional.all_reduce(x, "sum", group) + 0, torch.full((2, 3), size * (size - 1) / 2))
    gathered = functional.all_gather_tensor(x, 0, group) + 0
    assert torch.equal(gathered[::2, 0], torch.arange(float(size)))
    assert torch.equal(functional.reduce_scatter_tensor(gathered, "avg", 0, group) + 0, x)
    swapped = functional.all_to_all_single(gathered[::2], [1] * size, [1] * size, group) + 0
    assert torch.equal(swapped, x[:1].expand(size, 3))
    assert torch.equal(functional.broadcast(x, size - 1, group) + 0, torch.full((2, 3), float(size - 1)))


def test_a_sharded_model_is_saved_and_loaded(folder: Path) -> None:
    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = sharded()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=folder / "checkpoint")
    other, other_optimizer = sharded()
    state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / "checkpoint")
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert all(map(torch.equal, parameters(other), parameters(model)))


def test_a_sharded_model_is_saved_in_the_background(folder: Path) -> None:
    saved = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dcp.async_save({"model": saved.state_dict()}, checkpoint_id=folder / "checkpoint").result()
    loaded = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        loaded[0].weight.zero_()
    dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder / "checkpoint")
    assert all(map(torch.equal, parameters(loaded), parameters(saved)))


@pytest.mark.mpi(min_size=2)
def test_a_checkpoint_in_the_background_that_meets_a_call_of_the_program_is_a_mismatch_with_the_cure() -> None:
    rank, errors = dist.get_rank(), []

    def synchronize() -> None:
        try:
            dist.barrier()
        except CollectiveMismatch as error:
            errors.append(str(error))

    with ThreadPoolExecutor(1, "AsyncCheckpointExecutor" if rank else "main") as pool:
        pool.submit(synchronize).result()
    found = (
        r"rank 0: barrier; ranks? 1.*: barrier, by async_save in the background: "
        r"pass it process_group=torch\.distributed\.new_group\(\), one at a time"
    )
    assert re.search(found, errors[0])
    dist.barrier()


def test_a_sharded_model_takes_the_whole_state_of_rank_0() -> None:
    expected = make_model()
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with torch.no_grad():
        model[0].weight.zero_()
    state = expected.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    assert all(map(torch.equal, parameters(model), parameters(expected)))
