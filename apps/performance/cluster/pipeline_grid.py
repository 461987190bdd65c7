"""Pipelines side by side on slow links: activations, gradients of the model, both or neither travel in few bits.

Four nodes are two replicas of two stages, which are neighbours. A node has the load that it has in `pipeline`, so its
messages take as long as there beside its computing. AQ-SGD is timed once every example has been visited, and 4-bit Adam
once it has frozen its variance: from then on gradients travel in 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apps.environment import environment
from apps.launch import JobFailed
from apps.performance.cluster.driver import ClusterJob
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.pipeline import DELTAS, DIRECT, FP32, SLOW, make_stage
from apps.performance.durations import summary
from apps.records import Record, read_record
from collectives import Communicator
from collectives.communicator.splitting import Grid
from mpicomp.cli.timing import Seconds, alternate, gather

if TYPE_CHECKING:
    from mpicomp.torch import DistributedOptimizer, OneBitAdam

REPLICAS, STAGES, REPEATS = 2, 2, 7
RATES = ("1gbit", "100mbit")
"""Beside the slow rate, which follows from `pipeline`'s record."""
SCHEDULE = "1f1b"
DENSE, ADAM, ADAM_BITS = "dense", "4-bit Adam", 4
ACTIVATIONS = (FP32, DIRECT[1], DELTAS[1])
"""Without compression, and with the bits of the paper's figure: 3 forward, 6 backward."""
WAYS = tuple(product(ACTIVATIONS, (DENSE, ADAM)))
LEARNING_RATE = 1e-6
"""Weights hardly move. With the variance of one epoch, which is a single step here, 1e-3 is too much for 4-bit Adam."""
SENT = ("activations", "their gradients", "the model's gradients")


class Way:
    """Steps of this rank's stage, with activations and gradients that travel in one way; all methods are collective.

    Attributes
    ----------
    stage : PipelineStage
    sent : float64[3]
        Bytes of the last step that this rank has sent, by `SENT`.
    """

    def __init__(self, comm: Communicator, grid: Grid, load: Any, activations: str, gradients: str, seed: int) -> None:
        from apps.performance.pipeline_load import module_and_loss, trainer  # torch, which other jobs can do without

        stages, replicas = grid.along("stage"), grid.along("replica")
        module, loss = module_and_loss(load, stages.rank, stages.size)  # its own, since optimizers listen to backward
        self.stage = make_stage(stages, module, loss, load, SCHEDULE, activations, everyone=comm)
        self._optimizer = _optimizer(module, replicas, load, gradients, seed)
        self._train = trainer(self.stage, load, optimizer=self._optimizer, replica=replicas.rank)
        self.sent = np.zeros(len(SENT))

    def step(self) -> None:
        """Train on the next batch."""
        before = self.stage.bytes_sent
        self._train()
        messages = np.subtract(self.stage.bytes_sent, before)
        self.sent[:] = *messages, sum(one.traffic.last.bytes_sent for one in self._optimizer.aggregators)


def _optimizer(
    module: Any, replicas: Communicator, load: Any, gradients: str, seed: int
) -> OneBitAdam | DistributedOptimizer:
    """Adam, whose gradients are averaged densely behind backward, or exchanged in few bits after an epoch."""
    import torch

    from mpicomp import Dense
    from mpicomp.torch import DistributedOptimizer, OneBitAdam

    if gradients == ADAM:
        return OneBitAdam(
            module.parameters(), LEARNING_RATE, bits=ADAM_BITS, warmup_steps=load.batches, comm=replicas,
            named_parameters=module.named_parameters(), seed=seed,
        )  # fmt: skip
    adam = torch.optim.Adam(module.parameters(), LEARNING_RATE)
    return DistributedOptimizer(
        adam, Dense(), replicas, module.named_parameters(), backward_passes_per_step=load.micro_batches
    )


def measure_here(comm: Communicator, repeats: int, **load_options: int) -> Record:
    """Time steps of all ways; collective over `REPLICAS` x `STAGES` ranks. The options are those of a `Load`."""
    import torch  # which other jobs can do without

    from apps.performance.pipeline_load import Load

    torch.set_num_threads(1)
    load = Load(**load_options)
    with comm.grid(replica=REPLICAS, stage=STAGES) as grid:
        ways = {way: Way(comm, grid, load, *way, seed=number) for number, way in enumerate(WAYS)}
        timed = alternate({" and ".join(way): ways[way].step for way in WAYS}, repeats, load.batches + 1, comm)
        sent = {way: gather(comm, one.sent).max(axis=0) for way, one in ways.items()}
        own = sum(one.numel() for one in ways[WAYS[0]].stage.module.parameters())
        parameters = int(gather(comm, np.array([float(own)])).sum()) // REPLICAS
        for one in ways.values():
            one.stage.close()
    return {
        "part": "pipeline-grid",
        "load": asdict(load),
        "batch": REPLICAS * load.batch,
        "parameters": parameters,
        "environment": environment(),
        "rows": [_row(way, timed[" and ".join(way)], sent[way]) for way in WAYS],
    }


def _row(way: tuple[str, str], seconds: Seconds, sent: NDArray[np.float64]) -> dict[str, Any]:
    return {
        **dict(zip(("activations", "gradients"), way, strict=True)),
        "times_s": seconds.tolist(),
        **summary(seconds),
        "sent_bytes": dict(zip(SENT, sent.tolist(), strict=True)),
    }


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Give a job for each rate, and one at the slow rate of `pipeline`'s record."""
    clusters = [Cluster(REPLICAS * STAGES, rate) for rate in RATES]
    for cluster in clusters:
        yield ClusterJob(cluster, f"pipeline-grid-{cluster.name}", {"repeats": REPEATS})
    slow = records / "pipeline" / f"{SLOW}.json"
    if not slow.exists():
        raise JobFailed("the slow rate is not known, since the part pipeline was not measured")
    rate = read_record(slow)["settings"]["rate"]
    yield ClusterJob(Cluster(REPLICAS * STAGES, rate), "pipeline-grid-slow", {"repeats": REPEATS})
