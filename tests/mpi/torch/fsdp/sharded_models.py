"""Models under FSDP2 on two nodes of two ranks each, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from collectives import Communicator
from collectives.communicator.nodes import Nodes

VOCABULARY, WIDTH, LENGTH = 20, 24, 6


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        z: Tensor = x + self.narrow(self.wide(self.norm_2(x)).relu())
        return z


class Transformer(nn.Module):
    """Two layers; the head has a number of rows that two shards do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and classes of a rank in a step."""
    chance = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(VOCABULARY, (8, LENGTH), generator=chance)
    return tokens, tokens[:, 0] % 7


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Loss of a rank in a step."""
    tokens, classes = batch(rank, step)
    return nn.functional.cross_entropy(model(tokens), classes)


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard each block, and then the rest."""
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train, each rank on its own batches."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def parameters_of(model: nn.Module) -> Tensor:
    """All parameters in one vector, gathered from the shards."""
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([one.detach().reshape(-1) for one in whole]).clone()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a memory."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Cluster:
    """Nodes of two ranks: the communicators of both levels, and the mesh of this rank's node."""

    world: Communicator
    nodes: Nodes
    mesh: DeviceMesh

    @property
    def across(self) -> Communicator:
        """The ranks with equal shards."""
        assert self.nodes.across is not None
        return self.nodes.across

    @property
    def shards(self) -> DeviceMesh:
        """The mesh of one node."""
        return self.mesh["shard"]


@contextmanager
def cluster(world: Communicator, ranks_per_node: int = 2) -> Iterator[Cluster]:
    """Make the nodes' communicators, and a mesh over the default process group."""
    shape = (world.size // ranks_per_node, ranks_per_node)
    yield Cluster(world, world.nodes, init_device_mesh("cpu", shape, mesh_dim_names=("node", "shard")))
