"""The methods that are compared, each with the optimizer and the settings that suit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from collectives import Communicator
from mpicomp import Dense, DoubleSqueeze, Marsit, ScaleCom
from mpicomp.aggregator.parts import Synchronize
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedOptimizer, OneBitAdam

WEIGHT_DECAY = 0.01
WARM_UP = 0.1
"""Part of the steps in which the learning rate rises."""
DENSE = "dense"
SMALL = {"*.bias": Dense(), "*LayerNorm*": Dense()}
"""What little there is of biases and norms goes in full precision."""


class Method(Protocol):
    """Synchronization of the ranks. Its repr has everything that a result depends on."""

    def start(self, model: nn.Module, comm: Communicator, lr: float, steps: int) -> DistributedOptimizer | OneBitAdam:
        """The optimizer of a run of so many steps, on this rank."""


@dataclass(frozen=True)
class Averaged:
    """AdamW, whose gradients or updates, as the algorithm prefers it, are averaged; biases and norms are dense."""

    algorithm: Algorithm

    synchronize: ClassVar[Synchronize | None] = None

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """Return algorithms by the names of parameters."""
        return SMALL | {"*": self.algorithm}

    def start(self, model: nn.Module, comm: Communicator, lr: float, steps: int) -> DistributedOptimizer:
        """See `Method`."""
        inner = torch.optim.AdamW(groups(model), lr, weight_decay=WEIGHT_DECAY, fused=True)
        named = model.named_parameters()
        return DistributedOptimizer(inner, self.algorithms, comm, named, synchronize=self.synchronize)


@dataclass(frozen=True)
class MovesAveraged(Averaged):
    """The same, and it is always the moves of each rank's AdamW that are averaged."""

    synchronize: ClassVar[Synchronize | None] = "updates"


@dataclass(frozen=True)
class EmbeddingsApart(Averaged):
    """The same with another algorithm for the word embeddings, of whose gradient most rows are zero."""

    embeddings: Algorithm

    @property
    def algorithms(self) -> Mapping[str, Algorithm]:
        """Return algorithms by the names of parameters."""
        return SMALL | {"*word_embeddings*": self.embeddings, "*": self.algorithm}


@dataclass(frozen=True)
class OneBit:
    """OneBitAdam with the weight decay of AdamW; its first steps, this part of all, are dense."""

    warm_up: float

    def start(self, model: nn.Module, comm: Communicator, lr: float, steps: int) -> OneBitAdam:
        """See `Method`."""
        return OneBitAdam(
            groups(model), lr, weight_decay=WEIGHT_DECAY, decoupled_weight_decay=True,
            warmup_steps=max(1, round(self.warm_up * steps)), comm=comm, named_parameters=model.named_parameters(),
        )  # fmt: skip


METHODS: Mapping[str, Method] = {
    DENSE: Averaged(Dense()),
    "Marsit-100": Averaged(Marsit(100)),
    "OneBitAdam": OneBit(0.25),
    "ScaleCom": EmbeddingsApart(ScaleCom(rate=10, warmup_steps=20), ScaleCom(rate=50, warmup_steps=20)),
    "DoubleSqueeze": MovesAveraged(DoubleSqueeze("one-bit:bucket=384,scale=l1")),
}
RATES: Mapping[str, float] = {
    DENSE: 3e-4, "Marsit-100": 3e-4, "OneBitAdam": 3e-4, "ScaleCom": 0.0003, "DoubleSqueeze": 0.0003,
}  # fmt: skip
"""Learning rates, as ``--tune`` has found them."""


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Parameters for AdamW: matrices decay, biases and norms do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim > 1]},
        {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0},
    ]


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """A learning rate that rises linearly, and then falls linearly to zero behind the last step."""
    rising = max(1, round(WARM_UP * steps))
    return LambdaLR(optimizer, lambda step: min((step + 1) / rising, (steps - step) / (steps - rising)))
