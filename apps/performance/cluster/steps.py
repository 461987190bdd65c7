"""Whole training steps: PyTorch's DistributedDataParallel over Gloo, plain and with its own hooks, and ours.

Every implementation has a model of its own and makes the same step: forward, backward with its communication, SGD. All
take turns, in another order in each round. The slowest rank counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import mpicomp
from apps.environment import describe, environment
from apps.performance.auto import plan_of
from apps.performance.cluster.driver import ClusterJob, ClusterMeasurement
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.tables import NOTHING
from apps.performance.durations import summary
from apps.performance.part import get, table
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.auto.trials import Stage
from mpicomp.cli.timing import Seconds, alternate, elapsed, slowest

REPEATS = {"1gbit": 11, "10gbit": 15, "none": 15, "100mbit": 11}
LONG_S, LONG_REPEATS = 4.0, 2
"""A step that takes longer is timed in few of the rounds: it waits for the link, whose rate hardly varies."""
RATES = ("100mbit", "1gbit", "10gbit", "none")
CLUSTERS = tuple(Cluster(4, rate) for rate in REPEATS)
WARM_UPS, TRIAL_STEPS, MOST_TRIED = 2, 3, 200
GLOO_PORT, GLOO_TIMEOUT_S = 29_512, 600.0
MODELS = ("mlp-4", "mlp", "resnet", "transformer")
"""`mlp-4` is the MLP with batches of 4 instead of 32, so that computing takes little beside communication."""
GLOO = ("Gloo DDP", "Gloo DDP, fp16", "Gloo DDP, PowerSGD")
OURS: Mapping[str, tuple[Algorithm, dict[str, Any]]] = {
    "dense": (mpicomp.Dense(), {}),
    "dense, float16": (mpicomp.Dense(wire="float16"), {}),
    "Marsit": (mpicomp.Marsit(), {}),
    "Marsit, overlap": (mpicomp.Marsit(), {"overlap": True}),
    "DoubleSqueeze": (mpicomp.DoubleSqueeze(), {}),
    "ScaleCom": (mpicomp.ScaleCom(), {}),
    "Auto": (mpicomp.Auto(trial_steps=TRIAL_STEPS), {}),
}
CANDIDATES = ("dense", "Marsit")
"""What Auto chooses from."""
COMPARED = "Auto over the better of dense and Marsit"
WITHIN = 1.03
"""The same, at most."""


Loss = Callable[[Any], Any]
"""A rank's loss of a model, or of what wraps it."""


def build(name: str) -> tuple[Any, Loss]:
    """A model of 25, 13 or 11 million parameters, and a loss of it."""
    import torch
    from torch.nn.functional import cross_entropy

    from apps.performance.cluster.transformer import Transformer
    from apps.train.models import build as classifier

    torch.manual_seed(0)
    if name == "transformer":
        tokens = torch.randint(256, (2, 33))
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        return Transformer(), lambda model: cross_entropy(model(inputs).flatten(0, 1), targets)
    mlp = name.startswith("mlp")
    shape, batch = ((1, 28, 28), 32 if name == "mlp" else 4) if mlp else ((3, 8, 8), 8)
    images, labels = torch.rand(batch, *shape), torch.randint(10, (batch,))
    model = classifier("mlp", shape, 10, [4616] * 2, None) if mlp else classifier("resnet20", shape, 10, None, 112)
    return model, lambda model: cross_entropy(model(images), labels)


def measure_here(comm: Communicator, model: str, repeats: int, address: str) -> Record:
    """Time the implementations with the model of this name; collective."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    if not distributed.is_initialized():
        distributed.init_process_group(
            "gloo", init_method=f"tcp://{address}:{GLOO_PORT}", rank=comm.rank, world_size=comm.size,
            timeout=timedelta(seconds=GLOO_TIMEOUT_S),
        )  # fmt: skip
    steps = {name: _gloo(name, model) for name in GLOO} | {
        name: _ours(comm, algorithm, options, model) for name, (algorithm, options) in OURS.items()
    }
    warm = {
        name: slowest(np.array([elapsed(step, comm) for _ in range(WARM_UPS)]), comm) for name, step in steps.items()
    }
    tried = _try_out(steps["Auto"])
    counts = {name: LONG_REPEATS if one.min() > LONG_S else repeats for name, one in warm.items()}
    seconds = alternate(steps, counts, 0, comm)
    rows = [{"name": name, "step": summary(mine)} for name, mine in seconds.items()]
    compared = {name: compare(seconds["Auto"], seconds[name]) for name in CANDIDATES}
    parameters = sum(one.numel() for one in build(model)[0].parameters())
    distributed.destroy_process_group()
    told = {"part": "steps", "model": model, "parameters": parameters, "environment": environment()}
    return told | {"rows": rows, "compared": compared, "tried": tried}


def compare(mine: Seconds, other: Seconds) -> float:
    """The median of one's time over the other's, round by round where both were timed in every round."""
    if mine.size == other.size:
        return float(np.median(mine / other))
    return float(np.median(mine) / np.median(other))


def _gloo(name: str, model_name: str) -> Callable[[], None]:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model, loss = build(model_name)
    # with several buckets PowerSGD's sums come in another order on each rank, which Gloo does not bear
    buckets: dict[str, Any] = {"bucket_cap_mb": 1 << 12} if name.endswith("PowerSGD") else {}
    wrapped = DistributedDataParallel(model, **buckets)
    if name.endswith("fp16"):
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name.endswith("PowerSGD"):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return partial(_step, wrapped, loss, torch.optim.SGD(model.parameters(), lr=1e-6))


def _ours(comm: Communicator, algorithm: Algorithm, options: dict[str, Any], model_name: str) -> Callable[[], None]:
    import torch

    from mpicomp.torch import DistributedOptimizer

    model, loss = build(model_name)
    own = Communicator(comm.mpi_comm, timeout=comm.timeout)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6)
    return partial(_step, model, loss, DistributedOptimizer(inner, algorithm, own, model.named_parameters(), **options))


def _try_out(step: Callable[[], None]) -> int:
    """Make steps until Auto has chosen for every bucket; how many."""
    (*_, optimizer) = step.args  # type: ignore[attr-defined]
    tried = 0
    while tried < MOST_TRIED and any(plan_of(one).stage is not Stage.CHOSEN for one in optimizer.aggregators):
        step()
        tried += 1
    return tried


def _step(model: Any, loss: Loss, optimizer: Any) -> None:
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()  # here, as gradients of all implementations together take a fifth of the memory


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Give a job for each cluster and model."""
    for cluster, model in product(CLUSTERS, MODELS):
        yield ClusterJob(cluster, f"steps-{cluster.name}-{model}", {"model": model, "repeats": REPEATS[cluster.rate]})


def render(records: Sequence[Record]) -> str:
    """A table of steps per second for each model, with a column for each rate."""
    if not records:
        return NOTHING
    parts = []
    for model in MODELS:
        mine = {record["settings"]["rate"]: record for record in records if record["model"] == model}
        rates = [rate for rate in RATES if rate in mine]
        if not rates:
            continue
        first = mine[rates[0]]
        columns = (("steps a second", get("name")), *((rate, _column(mine[rate])) for rate in rates))
        rows = [{"name": name} for name in (*(row["name"] for row in first["rows"]), COMPARED)]
        heading = f"**{model}, {first['parameters']:,} parameters, {first['settings']['nodes']} nodes**"
        parts.append(f"{heading}\n\n{table(columns, rows)}\n\n<sub>{describe(first['environment'])}.</sub>")
    return "\n\n".join(parts)


def _column(record: Record) -> Callable[[Mapping[str, Any]], str]:
    """Steps a second, and how many times those of plain DDP; of the two that are compared the ratio of their times."""
    seconds = {row["name"]: row["step"]["median_s"] for row in record["rows"]}
    plain, over = seconds[GLOO[0]], max(record["compared"].values())

    def cell(row: Mapping[str, Any]) -> str:
        if row["name"] == COMPARED:
            return f"{over:.3f}" + " †" * (over > WITHIN)
        mine = seconds[row["name"]]
        return f"{1 / mine:.3g} ({plain / mine:.2f}×)"

    return cell


MEASUREMENT = ClusterMeasurement("steps", jobs, measure_here, render)
