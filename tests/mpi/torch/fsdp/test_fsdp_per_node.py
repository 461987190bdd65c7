"""HSDP with our hook equals DDP with PerNode to the bit, where both cut vectors at equal places or cuts do not matter.

Two ranks of a node: the sum of two numbers has no order, and its half is exact, so both have the same node means.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mpicomp import (
    QSGD,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    MajorityVote,
    Marsit,
    MemSGD,
    PerNode,
    PowerSGD,
    ScaleCom,
)
from mpicomp.torch import ddp_hook, fsdp_hook
from tests.mpi.torch.fsdp.sharded_models import Cluster, Transformer, loss_of, parameters_of, sgd, shard, train

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)
# An element's result depends on the nodes' values of this element alone, wherever it lies in a vector.
ELEMENTWISE: dict[str, Any] = {
    "dense": Dense(),
    "marsit, two winners": Marsit(3, winners=2, global_step=0.01),  # of two nodes: nothing is drawn
    "double squeeze": DoubleSqueeze("clip:bits=12"),
    "mem-sgd": MemSGD("clip:bits=12"),
}
# Scales of tensors and buckets, choices within chunks, random words of an element's place.
BY_PLACES: dict[str, Any] = {
    "marsit": Marsit(3),
    "majority vote": MajorityVote(),
    "ef-signsgd": EFSignSGD(),
    "scalecom": ScaleCom(rate=8),
    "local top-k": LocalTopK(rate=8),
    "qsgd": QSGD(),
    "double squeeze, one bit": DoubleSqueeze("one-bit:bucket=512"),
}


class Stack(nn.Module):
    """Layers of one weight each, whose halves begin at a multiple of 4096 elements, where every method may cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(64, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(3))
        self.head = nn.Linear(128, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def compare(kind: type[nn.Module], algorithm: Any, nodes: Cluster, exactly: bool) -> None:
    first = DistributedDataParallel(kind())
    train(first, sgd(first), range(1))
    weights = {name: one.clone() for name, one in first.module.state_dict().items()}
    ddp_model, model = kind(), kind()
    for one in ddp_model, model:
        one.load_state_dict(weights)
    wrapped = DistributedDataParallel(ddp_model, bucket_cap_mb=0.0004)
    state, hook = ddp_hook(PerNode(algorithm), nodes.world, wrapped)
    wrapped.register_comm_hook(state, hook)
    loss_of(wrapped, dist.get_rank(), 0).backward()  # DDP groups its buckets again
    assert not state.aggregators
    if isinstance(model, Stack):
        for layer in model.embedding, model.head:
            fully_shard(layer, mesh=nodes.shards)
    model = shard(model, nodes.shards)
    ours = fsdp_hook(algorithm, nodes.across, model)
    train(wrapped, sgd(wrapped), range(1, 7))
    train(model, sgd(model), range(1, 7))
    if exactly:
        assert torch.equal(parameters_of(model), parameters_of(wrapped))
    else:
        losses = [loss_of(one, dist.get_rank(), 99).item() for one in (model, wrapped)]
        assert losses == pytest.approx(losses[::-1], abs=0.1)
    assert {one.step for one in ours.aggregators} == {one.step for one in state.aggregators} == {6}


@pytest.mark.parametrize("form", ELEMENTWISE)
def test_a_transformer_has_the_bits_of_ddp_where_places_make_no_difference(form: str, nodes: Cluster) -> None:
    compare(Transformer, ELEMENTWISE[form], nodes, exactly=True)


@pytest.mark.parametrize("form", BY_PLACES)
def test_layers_of_one_weight_have_the_bits_of_ddp_where_places_matter(form: str, nodes: Cluster) -> None:
    compare(Stack, BY_PLACES[form], nodes, exactly=True)


@pytest.mark.parametrize("algorithm", [EFSignSGD(), PowerSGD(2, start_step=1)], ids=str)
def test_a_transformer_is_close_to_that_of_ddp_where_cuts_differ(algorithm: Any, nodes: Cluster) -> None:
    compare(Transformer, algorithm, nodes, exactly=False)
