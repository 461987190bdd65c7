"""A small training of pipelines with checkpoints, for jobs whose ranks die and for threads that go on from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp import Dense
from mpicomp.codecs import RowQuantizer
from mpicomp.pipeline import Deltas, Direct, PipelineStage, StageCheckpoints
from mpicomp.torch import DistributedOptimizer

STAGES, WIDTH, EXAMPLES, MICRO_BATCHES = 2, 6, 16, 4

Strike = Callable[[int, str], None]
"""Called with the step and the phase that a rank has come to."""


class Slice(nn.Module):
    """Layers of a stage, with a buffer that each step changes."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        random = np.random.default_rng(stage)  # not PyTorch's, which threads share
        for parameter in self.layer.parameters():
            parameter.data.copy_(torch.from_numpy(random.normal(size=parameter.shape)))
        self.strike: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.strike()
        found: Tensor = torch.tanh(self.norm(self.layer(x)))
        return found


def train(
    comm: Communicator,
    folder: Path,
    last: int,
    strike: Strike = lambda step, phase: None,
    every: int = 1000,
) -> dict[str, Any]:
    """Train from the newest checkpoint to step `last`; returns all that the ranks end with."""
    torch.set_num_threads(1)  # of this thread: more of them fight over the cores
    grid = comm.grid(replica=comm.size // STAGES, stage=STAGES)
    stages, replicas = grid.along("stage"), grid.along("replica")
    first, final = stages.rank == 0, stages.rank == STAGES - 1
    module = Slice(stages.rank)
    stage = PipelineStage(
        module,
        stages,
        MICRO_BATCHES,
        loss=nn.functional.mse_loss if final else None,
        forward=Deltas(RowQuantizer(4), EXAMPLES),
        backward=Direct(RowQuantizer(8)),
        everyone=comm if replicas.size > 1 else None,
    )
    adam: Any = torch.optim.Adam(module.parameters(), lr=0.01)
    named = list(module.named_parameters())
    optimizer = (
        adam
        if replicas.size == 1
        else DistributedOptimizer(adam, Dense(), replicas, named, backward_passes_per_step=MICRO_BATCHES)
    )
    with StageCheckpoints(folder, stage, {"module": module, "optimizer": optimizer}, every=every) as checkpoints:
        begun = checkpoints.load()
        for number in range(begun, last):
            module.strike = lambda number=number: strike(number, "forward")
            random = np.random.default_rng([replicas.rank, number % 2])
            inputs, targets = (torch.from_numpy(random.normal(size=(8, WIDTH)).astype(np.float32)) for _ in range(2))
            with checkpoints.step():
                strike(number, "begin")
                optimizer.zero_grad()
                stage.step(inputs if first else None, targets if final else None, np.arange(8) + 8 * (number % 2))
                strike(number, "optimizer")
                optimizer.step()
                strike(number, "end")
    # the threads of a process load their common modules one by one
    found = {
        "begun": begun,
        "parameters": {name: one.detach().numpy().tobytes() for name, one in module.named_parameters()},
        "buffers": {name: one.numpy().tobytes() for name, one in module.named_buffers()},
        "moments": [one["exp_avg_sq"].numpy().tobytes() for one in adam.state.values()],
        "messages": stage.state_dict()["codings"],
        "steps": stage.steps,
    }
    stage.close()
    grid.close()
    return found
