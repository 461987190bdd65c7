"""Train small networks as ``apps.train`` does, with ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812

from apps.records import Record
from apps.studies.results import Results
from apps.train.data import Dataset, Split, load
from apps.train.models import build
from apps.train.options import parse
from apps.train.training import Training
from collectives import Communicator, NonFiniteGradient, TopologyName
from collectives.threads.run_local import run_local
from mpicomp.algorithms import Algorithm

Watch = Callable[[Communicator, Training], None]
"""It is called on every rank after each step that leaves all ranks with the same model; it may be collective."""

_loaded = cache(load)
KEPT = ("epoch", "loss", "accuracy", "test_loss", "bytes_so_far_per_rank", "bits_per_element")


@dataclass(frozen=True)
class Task:
    """A training run except for its method and seed, with `options` of ``python -m apps.train``.

    Of the dataset only the first `train_samples` and `test_samples` are used; None: all. With `ranks_per_node` so many
    neighbouring ranks count as a node; None: the ranks of a host do. With `islands` the ranks of a node average their
    gradients at every step, and the method runs on the nodes' updates.
    """

    options: tuple[str, ...]
    ranks: int
    topology: str = "ring"
    train_samples: int | None = None
    test_samples: int | None = None
    ranks_per_node: int | None = None
    islands: bool = False

    def settings(self, method: Algorithm, seed: int, own_options: Sequence[str] = ()) -> Record:
        """All that the result of a run depends on, for `Results`."""
        settings = {
            "options": [*self.options, *own_options],
            "method": repr(method),
            "seed": seed,
            "ranks": self.ranks,
            "topology": self.topology,
            "samples": [self.train_samples, self.test_samples],
        }
        if self.ranks_per_node is not None:  # results of other tasks have settings without it
            settings["ranks_per_node"] = self.ranks_per_node
        if self.islands:
            settings["islands"] = True
        return settings


def trained(
    results: Results, name: str, task: Task, method: Algorithm, seed: int, own_options: Sequence[str] = ()
) -> Record:
    """The result of `train`, from the folder if it is there; its name is `name` and the seed."""
    settings = task.settings(method, seed, own_options)
    return results.get(f"{name}-{seed}", settings, lambda: train(task, method, seed, own_options))


def train(
    task: Task, method: Algorithm, seed: int, own_options: Sequence[str] = (), watch: Watch | None = None
) -> Record:
    """Train; the seed decides the first model and the order of images, for every method.

    The `own_options` of the method, such as its learning rate, come after those of the task.

    Returns
    -------
    dict
        ``epochs``: a record per epoch with the keys `KEPT`; bytes are the mean over ranks.
        ``accuracy``: that at the end, or of a guess if training diverged. ``diverged``: whether a gradient had NaN or
        infinity. ``count``: number of trained elements.
    """
    options = parse([*task.options, *own_options, "--seed", str(seed), "--topology", task.topology])
    whole = _loaded(options.dataset, options.data)
    parts = ((whole.train, task.train_samples), (whole.test, task.test_samples))
    train, test = (Split(part.images[:samples], part.labels[:samples]) for part, samples in parts)
    dataset = Dataset(train, test, whole.n_classes)

    def rank(comm: Communicator) -> Record:
        torch.set_num_threads(1)  # of this thread: the ranks are the parallel part
        islands = comm.nodes.local if task.islands else None
        training = Training(options, comm, dataset, method, islands=islands)

        def after_step() -> bool:
            if watch is not None:
                watch(comm, training)
            return False

        epochs: list[Record] = []
        diverged = False
        try:
            while training.epoch < options.epochs:
                training.train_epoch(after_step)
                record = training.close_epoch()
                epochs.append({key: record[key] for key in KEPT})
        except NonFiniteGradient:
            diverged = True
        accuracy = 1 / dataset.n_classes if diverged else epochs[-1]["accuracy"]
        return {"epochs": epochs, "accuracy": accuracy, "diverged": diverged, "count": training.n_parameters}

    options_of_nodes = {} if task.ranks_per_node is None else {"ranks_per_node": task.ranks_per_node}
    return run_local(task.ranks, rank, cast(TopologyName, task.topology), **options_of_nodes)[0]


def last(records: Sequence[Record], key: str) -> list[float]:
    """A figure of the last epoch of each seed."""
    return [float(record["epochs"][-1][key]) for record in records]


def per_epoch(records: Sequence[Record], key: str, factor: float = 1.0) -> list[list[float]]:
    """A figure of every epoch, a list for each seed."""
    return [[factor * float(epoch[key]) for epoch in record["epochs"]] for record in records]


class NoiseStep:
    """Forward and backward pass of a perceptron on images of noise, for timing; the gradient has `n` elements."""

    def __init__(self, hidden: int, batch: int) -> None:
        torch.set_num_threads(1)
        self._model = build("mlp", (1, 28, 28), 10, (hidden,), None)
        self._images, self._labels = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
        self.n = sum(parameter.numel() for parameter in self._model.parameters())

    def gradient(self) -> NDArray[Any]:
        """The gradient as one vector."""
        self._model.zero_grad()
        F.cross_entropy(self._model(self._images), self._labels).backward()
        grads = [parameter.grad.reshape(-1) for parameter in self._model.parameters() if parameter.grad is not None]
        return torch.cat(grads).numpy()


def heavy_tailed(n: int, rank: int, step: int, common_seed: Sequence[int]) -> NDArray[np.float32]:
    """A made gradient of a rank at a step, with heavy tails; a part of it is the same on all ranks."""
    common = np.random.default_rng(tuple(common_seed)).standard_t(3, n)
    return (common + np.random.default_rng((1, step, rank)).standard_normal(n)).astype(np.float32)
