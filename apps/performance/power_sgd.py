"""PowerSGD against PyTorch's own hook over Gloo: both train the same model on the same data, step by step in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import MS, Column, Part, Row, both, make_record
from apps.records import Record
from apps.train.data import Sampler, Split, load
from apps.train.models import build
from collectives import Communicator
from mpicomp.cli.timing import alternate

RANK, DENSE_STEPS, GLOBAL_BATCH = 4, 2, 128
SIDES = ("all-reduce", "PyTorch", "mpicomp")


def measure(models: Sequence[tuple[tuple[int, ...], int, int]], rate: float) -> Record | None:
    """Train MLPs of some widths on the digits, for some epochs, with some seeds; collective."""
    import torch
    import torch.distributed as dist

    from mpicomp.torch import register_backend

    torch.set_num_threads(1)
    register_backend()
    dist.init_process_group("mpicomp")
    gloo, rows = dist.new_group(backend="gloo"), list[Row]()
    for hidden, epochs, seeds in models:
        seconds: dict[str, list[Any]] = {side: [] for side in SIDES}
        ends: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        steps = n_parameters = 0
        for seed in range(seeds):
            with Communicator() as comm:
                sides = {side: Side(side, comm, gloo, hidden, epochs, seed, rate) for side in SIDES}
                steps, n_parameters = sides["mpicomp"].n_steps, sides["mpicomp"].n_parameters
                timed = alternate(
                    {name: one.step for name, one in sides.items()}, steps - DENSE_STEPS, DENSE_STEPS, comm
                )
                for name, one in sides.items():
                    seconds[name].append(timed[name])
                    ends[name].append(one.end())
        row: Row = {"hidden": hidden, "parameters": n_parameters, "steps": steps, "seeds": seeds}
        for name in SIDES:
            loss, accuracy = np.mean(ends[name], 0)
            row[name] = {**summary(np.concatenate(seconds[name])), "loss": loss, "accuracy": accuracy}
        rows.append(row)
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    record = make_record(rows, data="digits", rank=RANK, batch=GLOBAL_BATCH // size, rate=rate, ranks=size)
    dist.destroy_process_group()
    return record if is_first else None


class Side:
    """A model with one of the ways to average its gradients."""

    def __init__(
        self, name: str, comm: Communicator, gloo: Any, hidden: tuple[int, ...], epochs: int, seed: int, rate: float
    ) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        from mpicomp.torch import ddp_hook

        data = load("digits")
        torch.manual_seed(seed)
        model = build("mlp", data.image_shape, data.n_classes, hidden, None)
        # of several buckets PyTorch's hook sums factors in the order in which they arrive, which differs between ranks
        self._model = DistributedDataParallel(model, process_group=gloo, bucket_cap_mb=1000)
        self.n_parameters = sum(one.numel() for one in self._model.parameters())
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=rate, momentum=0.9)
        if name == "PyTorch":
            state = PowerSGDState(gloo, RANK, start_powerSGD_iter=DENSE_STEPS, min_compression_rate=1)
            self._model.register_comm_hook(state, powerSGD_hook)
        if name == "mpicomp":  # the hook's first step is dense and not counted
            method = mpicomp.PowerSGD(RANK, start_step=DENSE_STEPS - 1)
            self._model.register_comm_hook(*ddp_hook(method, comm, self._model))
        sampler = Sampler(len(data.train), GLOBAL_BATCH // comm.size, comm.rank, comm.size, seed)
        self.n_steps = epochs * sampler.n_steps
        self._train, self._test = data.train, data.test
        self._batches = (batch for epoch in range(epochs) for batch in sampler.epoch(epoch))

    def step(self) -> None:
        """Take a training step."""
        batch = next(self._batches)
        self._optimizer.zero_grad()
        self._loss(Split(self._train.images[batch], self._train.labels[batch])).backward()
        self._optimizer.step()

    def end(self) -> tuple[float, float]:
        """Return the training loss, and the accuracy on the test images in percent."""
        import torch

        with torch.no_grad():
            found = self._model(self._test.images).argmax(1) == self._test.labels
            return float(self._loss(self._train)), 100 * float(found.float().mean())

    def _loss(self, data: Split) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(self._model(data.images), data.labels)


def _each(cell: Callable[[Any], str]) -> Callable[[Row], str]:
    return lambda row: " / ".join(cell(row[side]) for side in SIDES)


COLUMNS: Sequence[Column] = (
    ("hidden layers", lambda row: " ".join(map(str, row["hidden"]))),
    ("parameters", lambda row: f"{row['parameters']:,}"),
    ("steps x seeds", lambda row: f"{row['steps']} x {row['seeds']}"),
    ("a step, ms", _each(lambda side: both(side, MS))),
    ("mpicomp over PyTorch", lambda row: f"{row['mpicomp']['median_s'] / row['PyTorch']['median_s']:.2f}"),
    ("accuracy, %", _each(lambda side: f"{side['accuracy']:.2f}")),
    ("training loss", _each(lambda side: f"{side['loss']:.4f}")),
)
PART = Part(
    "power_sgd",
    "PowerSGD against PyTorch's own hook over Gloo, and against an all-reduce by Gloo.",
    measure,
    COLUMNS,
    quick={"models": (((32,), 2, 1),), "rate": 0.05},
    full={"models": (((512, 512), 20, 5), ((2048, 2048), 4, 1)), "rate": 0.05},
    ranks=(2, 4),
    note=lambda record: f"\n\nValues are those of {', '.join(SIDES[:-1])} and {SIDES[-1]}; times are median (minimum).",
)

if __name__ == "__main__":
    sys.exit(PART.main())
