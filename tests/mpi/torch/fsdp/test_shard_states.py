"""States of the hook for FSDP2: exact resumption, and other numbers of nodes and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from collectives import Communicator
from mpicomp import QSGD, Auto, DoubleSqueeze, EFSignSGD, Marsit, PowerSGD
from mpicomp.torch import FSDPHook, fsdp_hook
from tests.mpi.torch.fsdp.sharded_models import Cluster, Transformer, cluster, parameters_of, sgd, shard, train

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)
FORMS: dict[str, Any] = {
    "marsit": Marsit(3),
    "ef-signsgd": EFSignSGD(),
    "double squeeze": DoubleSqueeze(),
    "power-sgd": PowerSGD(1, start_step=1),
    "qsgd": QSGD(),
    "auto": Auto(DoubleSqueeze(), trial_steps=25),
}
Trained = tuple[nn.Module, torch.optim.Optimizer, FSDPHook]


def start(algorithm: Any, nodes: Cluster) -> Trained:
    model = shard(Transformer(), nodes.shards)
    return model, sgd(model), fsdp_hook(algorithm, nodes.across, model)


def save(trained: Trained, folder: Path) -> None:
    model, optimizer, hook = trained
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer, "hook": hook}, checkpoint_id=folder)


def load(trained: Trained, folder: Path, with_hook: bool = True) -> None:
    model, optimizer, hook = trained
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    state = {"model": saved_model, "optimizer": saved_optimizer}
    dcp.load({**state, "hook": hook} if with_hook else state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved_model, optim_state_dict=saved_optimizer)


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_to_the_bit_from_a_distributed_checkpoint(form: str, nodes: Cluster, folder: Path) -> None:
    trained = start(FORMS[form], nodes)
    train(*trained[:2], range(4))
    save(trained, folder / "checkpoint")
    train(*trained[:2], range(4, 8))
    resumed = start(FORMS[form], nodes)
    load(resumed, folder / "checkpoint")
    train(*resumed[:2], range(4, 8))
    assert torch.equal(parameters_of(resumed[0]), parameters_of(trained[0]))
    for one, other in zip(resumed[2].aggregators, trained[2].aggregators, strict=True):
        np.testing.assert_equal(one.state_dict(), other.state_dict())


def test_a_state_is_a_copy_and_goes_by_names(nodes: Cluster) -> None:
    model, optimizer, hook = start(EFSignSGD(), nodes)
    train(model, optimizer, range(2))
    saved = hook.state_dict()
    before = {key: value.to_local().clone() for key, value in saved.items() if key.startswith("residual/")}
    assert set(before) == {f"residual/{name}" for name, one in model.named_parameters()}
    whole = saved["residual/head.weight"]
    assert tuple(whole.shape) == (2, 7, 24)
    assert tuple(whole.to_local().shape) == (1, 4 - nodes.nodes.local.rank, 24)
    train(model, optimizer, range(2, 4))
    assert all(torch.equal(saved[key].to_local(), value) for key, value in before.items())
    assert not torch.equal(hook.state_dict()["residual/head.weight"].to_local(), before["residual/head.weight"])
    hook.load_state_dict(saved)
    assert torch.equal(hook.state_dict()["residual/head.weight"].to_local(), before["residual/head.weight"])
    assert {one.step for one in hook.aggregators} == {2}


def pending(hook: FSDPHook, entry: str, comm: Communicator) -> dict[str, np.ndarray]:
    """Return the mean over the nodes of each parameter's entry, of all shards."""
    state = hook.state_dict()
    parts = {key: value for key, value in state.items() if key.startswith(f"{entry}/")}
    shards = comm.allgather_object({key: value.to_local().numpy() for key, value in parts.items()})
    rows: dict[str, dict[int, list[np.ndarray]]] = {}
    places = comm.allgather_object(hook._states._shard)
    for place, own in zip(places, shards, strict=True):
        for key, value in own.items():
            rows.setdefault(key, {}).setdefault(place, []).append(value[0])
    return {
        key: np.concatenate([np.mean(by_shard[place], 0, np.float64) for place in sorted(by_shard)])
        for key, by_shard in rows.items()
    }


@pytest.mark.parametrize(
    ("form", "ranks_per_node"),
    [("marsit", 1), ("ef-signsgd", 4), ("power-sgd", 1), ("double squeeze", 1), ("double squeeze", 4)],
)
def test_a_checkpoint_is_loaded_on_other_numbers_of_nodes_and_shards(
    form: str, ranks_per_node: int, nodes: Cluster, folder: Path
) -> None:
    trained = start(FORMS[form], nodes)
    train(*trained[:2], range(4))
    save(trained, folder / "checkpoint")
    entry = "worker_error" if form == "double squeeze" else "residual"
    before = pending(trained[2], entry, nodes.world)
    world = Communicator(nodes.world.mpi_comm, topology="ring", ranks_per_node=ranks_per_node)
    with world, cluster(world, ranks_per_node) as other:
        resumed = start(FORMS[form], other)
        load(resumed, folder / "checkpoint", with_hook=False)
        resumed[2].load_checkpoint(folder / "checkpoint")
        assert {one.step for one in resumed[2].aggregators} == {4}
        after = pending(resumed[2], entry, world)
        assert before.keys() == after.keys()
        for key, value in before.items():
            np.testing.assert_allclose(after[key], value, rtol=1e-6, atol=1e-9, err_msg=key)
        train(*resumed[:2], range(4, 6))
        assert parameters_of(resumed[0]).isfinite().all()


def test_the_scales_of_tensors_are_taken_over_by_other_shards(nodes: Cluster, folder: Path) -> None:
    trained = start(Marsit(), nodes)
    train(*trained[:2], range(4))
    save(trained, folder / "checkpoint")
    of_shards = nodes.nodes.local.allgather_object(scales(trained[2]))
    world = Communicator(nodes.world.mpi_comm, topology="ring", ranks_per_node=4)
    with world, cluster(world, 4) as other:
        resumed = start(Marsit(), other)
        resumed[2].load_checkpoint(folder / "checkpoint")
        found = scales(resumed[2])
        for name, value in found.items():
            assert value == of_shards[other.nodes.local.rank // 2].get(name, value), name
        assert "blocks.0.wide.weight" in found


def scales(hook: FSDPHook) -> dict[str, float]:
    pairs = zip(hook.buckets, hook.aggregators, strict=True)
    return {
        name: scale
        for names, one in pairs
        for name, scale in zip(names, one.state_dict()["magnitudes"].tolist(), strict=True)
    }
