"""The training loop, and the state of it that a checkpoint must hold."""

from __future__ import annotations

import argparse
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from apps.train.agreement import JobError, gather_rows
from apps.train.data import Dataset, Split
from apps.train.dealer import Dealer
from apps.train.learning_rate import LearningRate
from apps.train.meter import Meter
from apps.train.models import build
from collectives import Communicator
from collectives.json_file import fields
from collectives.recovery.newcomers import newcomers_of
from mpicomp.algorithms import Algorithm
from mpicomp.algorithms.per_node import method_of
from mpicomp.torch import DistributedOptimizer, OneBitAdam, average_buffers, broadcast_parameters

_EVALUATION_BATCH = 500
_SEEDED = threading.Lock()
"""A rank holds it while it draws from torch's own generator, which ranks that are threads share."""


class Training:
    """The part of a run that one rank has.

    Parameters
    ----------
    options, comm, dataset, algorithm
        Options of the job, its ranks, the data, and the method by which the ranks synchronize.
    device
        Where this rank has its model and its data.
    islands
        Communicator of this rank's island, whose gradients are averaged at every step; None: there are no islands.

    Attributes
    ----------
    step
        Number of steps since the run's start.
    dealer
        Place in the order of images.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        comm: Communicator,
        dataset: Dataset,
        algorithm: Algorithm | None,
        device: torch.device | str = "cpu",
        islands: Communicator | None = None,
    ) -> None:
        self._seed: int = options.seed
        with _SEEDED:
            torch.manual_seed(options.seed)
            self.model = build(options.model, dataset.image_shape, dataset.n_classes, options.hidden, options.width)
            self._seed_rank(comm.rank)
        self.model = self.model.to(device)
        broadcast_parameters(self.model, comm)
        self.optimizer = _optimizer(options, self.model, comm, algorithm, islands)
        self.dealer = Dealer(len(dataset.train), options.batch, comm, options.seed, options.keep_batch)
        _warm_up(algorithm or self.optimizer.algorithm, comm)
        self.step = 0
        self.best_accuracy = 0.0
        self.meter = Meter()
        # Mean losses of this rank's batches, times the images of all ranks in these steps, whose number may change.
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._loss_images = 0
        self._comm, self._options = comm, options
        self._dataset = dataset.to(device)
        self._generator = _generator_of(self._loss_sum.device)
        every: int | None = None if algorithm is None else method_of(algorithm).full_precision_every
        self._full_precision_every = every

    @property
    def n_parameters(self) -> int:
        """Number of trained elements of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def epoch(self) -> int:
        """Number of epochs that have been completed since the run's start."""
        return self.dealer.epoch

    @property
    def n_steps(self) -> int:
        """Steps of the whole run on this number of ranks."""
        return int(self._options.epochs) * self.dealer.n_steps

    @property
    def position(self) -> int:
        """Steps of the schedule that are done: `step`, unless a part of the run was on another number of ranks."""
        return self.dealer.position

    @property
    def learning_rate(self) -> LearningRate:
        """Schedule of the run on this number of ranks."""
        options, steps_per_epoch = self._options, self.dealer.n_steps
        return LearningRate(
            options.lr,
            self.n_steps,
            round(options.warmup_epochs * steps_per_epoch),
            options.decay,
            tuple(epoch * steps_per_epoch for epoch in options.decay_epochs),
            options.decay_factor,
        )

    def train_epoch(self, after_step: Callable[[], bool], before_step: Callable[[], object] | None = None) -> bool:
        """Run the rest of the current epoch; returns whether it was completed.

        `after_step` is called after each step that leaves all ranks with the same model, and returns true to stop
        there. `before_step` is called before the images of a step are drawn, also where the epoch has no more.
        """
        optimizer = self.optimizer
        self.model.train()
        while True:
            if before_step is not None:
                before_step()
            if (indices := self.dealer.draw()) is None:
                break
            started = time.perf_counter()
            before = optimizer.synchronizations
            self._set_learning_rate()
            optimizer.zero_grad()
            loss = self._backward(indices)
            computed = time.perf_counter()
            optimizer.step()
            self._loss_sum.add_(loss, alpha=self.dealer.global_batch)
            self._loss_images += self.dealer.global_batch
            self.step += 1
            if optimizer.synchronizations > before:
                self._after_synchronization(computed)
            self.meter.seconds_training += time.perf_counter() - started
            if not optimizer.models_differ and after_step():
                return False
        if isinstance(optimizer, DistributedOptimizer) and optimizer.models_differ:
            optimizer.synchronize()
            self._after_synchronization()
        return True

    def _backward(self, indices: Tensor) -> Tensor:
        """Add up the gradients of a step's images, so many at once as a rank has at the start; return the loss."""
        *earlier, last = torch.split(indices, self._options.batch)
        losses = []
        if earlier:
            with self.optimizer.no_sync() if isinstance(self.optimizer, DistributedOptimizer) else nullcontext():
                losses = [self._backward_once(part) for part in earlier]
        return sum(losses, self._backward_once(last))

    def _backward_once(self, indices: Tensor) -> Tensor:
        train = self._dataset.train
        loss = F.cross_entropy(self.model(train.images[indices]), train.labels[indices])
        loss = loss * self.dealer.weight(len(indices))
        loss.backward()
        return loss.detach()

    def close_epoch(self) -> dict[str, Any]:
        """Average the buffers of the model, evaluate it, and return the record of the epoch; collective."""
        average_buffers(self.model, self._comm)
        accuracy, test_loss = self.evaluate(self._dataset.test)
        self.best_accuracy = max(self.best_accuracy, accuracy)
        losses = gather_rows(self._comm, self._loss_sum.reshape(1).cpu().numpy())
        loss = float(losses.mean()) / max(1, self._loss_images)
        self._loss_sum.zero_()
        self._loss_images = 0
        return {
            "epoch": self.epoch,
            "loss": loss,
            "accuracy": accuracy,
            "test_loss": test_loss,
            "learning_rate": self.learning_rate(self.position - 1),
            **self.meter.summary(self._comm, self.n_parameters),
        }

    @torch.no_grad()
    def evaluate(self, split: Split) -> tuple[float, float]:
        """Accuracy and mean loss of the model on a split, of which each rank evaluates a part; collective."""
        self.model.eval()
        while True:
            size = self._comm.size
            right, loss = self._evaluate_part(split, slice(self._comm.rank, None, size))
            rows = gather_rows(self._comm, np.array([right, loss, size], np.float64))
            # The part of a rank that has died since is evaluated by the others. All decide by the same rows.
            if (rows[:, 2] == len(rows)).all():
                right, loss, _ = rows.sum(axis=0)
                return float(right) / len(split), float(loss) / len(split)

    def _evaluate_part(self, split: Split, mine: slice) -> tuple[int, float]:
        """Return the number of right answers on a part of a split, and the sum of its losses."""
        images, labels = split.images[mine], split.labels[mine]
        right, loss = 0, 0.0
        for batch_images, batch_labels in zip(
            torch.split(images, _EVALUATION_BATCH), torch.split(labels, _EVALUATION_BATCH), strict=True
        ):
            scores = self.model(batch_images)
            right += int((scores.argmax(1) == batch_labels).sum())
            loss += float(F.cross_entropy(scores, batch_labels, reduction="sum"))
        return right, loss

    def result(self) -> dict[str, Any]:
        """The closing record of the run; JobError if the ranks hold different parameters; collective."""
        accuracy, test_loss = self.evaluate(self._dataset.test)
        return {
            "epochs": self.epoch,
            "steps": self.step,
            "accuracy": accuracy,
            "best_accuracy": self.best_accuracy,
            "test_loss": test_loss,
            **self.meter.per_round(self._comm),
            **self.meter.summary(self._comm, self.n_parameters),
            # A training run times no other all-reduce; `mpicomp bench` does.
            "baseline": None,
            "baseline_seconds": None,
            "speedup": None,
            "parameters_sha256": self._digest(),
        }

    def _digest(self) -> str:
        sha256 = hashlib.sha256()
        for parameter in self.model.parameters():
            sha256.update(parameter.detach().contiguous().cpu().numpy().tobytes())
        digests = gather_rows(self._comm, np.frombuffer(sha256.digest(), "<u4").astype(np.float64))
        differing = np.flatnonzero((digests != digests[0]).any(axis=1))
        if differing.size:
            raise JobError(
                f"rank {differing[0]} of {len(digests)} ends with other parameters than rank 0; please report this, "
                "and train again from an earlier checkpoint"
            )
        return sha256.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The state that only this rank has; ``model.state_dict()`` has the parameters."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "images": self.dealer.images,
            "best_accuracy": self.best_accuracy,
            "loss_sum": self._loss_sum.clone(),
            "loss_images": self._loss_images,
            "buffers": dict(self.model.named_buffers()),
            "optimizer": self.optimizer.state_dict(),
            "meter": self.meter.state_dict(),
            "torch_random": self._generator.get_state(),
        }

    def counters(self) -> dict[str, Any]:
        """Return the state that a newcomer takes over by `adopt`; model, optimizer and dealer send their own."""
        return {
            "step": self.step,
            "best_accuracy": self.best_accuracy,
            "loss_sum": self._loss_sum.cpu(),
            "loss_images": self._loss_images,
            "meter": self.meter.state_dict(),
        }

    def adopt(self, counters: dict[str, Any]) -> None:
        """Continue from a member's counters, its cost and the losses of its epoch, as if they were this rank's own."""
        self.step, self.best_accuracy = counters["step"], counters["best_accuracy"]
        self._loss_sum.copy_(counters["loss_sum"])
        self._loss_images = counters["loss_images"]
        self.meter.load_state_dict(counters["meter"])
        # this rank's number in the job: it has no number among the members yet
        self._seed_rank(self._comm.members[0] + 1_000_003 * self.step)

    def restoring(self, model: dict[str, Tensor], state: dict[str, Any]) -> Iterator[Callable[[], None]]:
        """Return functions that restore the model and a result of `state_dict` or `redistribute`, part by part.

        The first part, which may fail on one rank, has no collectives. The second one, the optimizer's, is collective,
        and raises on all ranks or on none.
        """
        yield partial(self._load_own, model, state)
        yield lambda: self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def _load_own(self, model: dict[str, Tensor], state: dict[str, Any]) -> None:
        if "epoch_step" in state:
            raise ValueError(
                "the checkpoint is of an earlier version, which counted steps in place of images: use that"
            )
        counters = dict.fromkeys(("epoch", "step", "images", "loss_images"), int)
        fields(state, **counters, best_accuracy=float, buffers=dict, optimizer=dict, meter=dict)
        self.model.load_state_dict(model)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.dealer.seek(state["epoch"], state["images"])
        self.step, self.best_accuracy = state["step"], state["best_accuracy"]
        self._loss_sum.copy_(state["loss_sum"])
        self._loss_images = state["loss_images"]
        self.meter.load_state_dict(state["meter"])
        if state["torch_random"] is None:
            self._seed_rank(self._comm.rank + 1_000_003 * self.step)
        else:
            self._generator.set_state(state["torch_random"])

    def _seed_rank(self, number: int) -> None:
        """Have dropout differ between ranks, as their images do."""
        torch.manual_seed(self._seed * 1_000_003 + number + 1)

    def _set_learning_rate(self) -> None:
        rate = self.learning_rate(self.position - 1)  # the images of this step have been drawn
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _after_synchronization(self, computed: float = 0.0) -> None:
        self.meter.count(self.optimizer.aggregators, computed)
        every = self._full_precision_every
        if every is not None and (self.optimizer.synchronizations - 1) % every == 0:
            average_buffers(self.model, self._comm)


def device_of(kind: str, comm: Communicator) -> torch.device:
    """The device of a rank: "cpu", or for "cuda" one of the GPUs of its node, which are dealt to the ranks in turn.

    Raises
    ------
    ValueError
        There is no GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(
            f"--device {kind}, but PyTorch finds no GPU: install its build for the GPU, start ranks where "
            "there is one, or take --device cpu"
        )
    newcomers = newcomers_of(comm)
    local_rank = comm.local_rank if newcomers is None else newcomers.local_rank
    device = torch.device(kind, local_rank % count)
    torch.cuda.set_device(device)
    return device


def _generator_of(device: torch.device) -> torch.Generator:
    """Generator that dropout draws from."""
    if device.type == "cuda":
        generator: torch.Generator = torch.cuda.default_generators[device.index]
        return generator
    return torch.default_generator


def _optimizer(
    options: argparse.Namespace,
    model: nn.Module,
    comm: Communicator,
    algorithm: Algorithm | None,
    islands: Communicator | None,
) -> DistributedOptimizer | OneBitAdam:
    """Make the optimizer that synchronizes the ranks: OneBitAdam, or another optimizer with an algorithm."""
    named, bucket_mb = model.named_parameters(), options.bucket_mb
    rates = {"lr": options.lr, "weight_decay": options.weight_decay}
    if algorithm is None:
        own = {"bucket_mb": bucket_mb, "per_node": options.per_node, **options.algorithm_options}
        try:
            return OneBitAdam(model.parameters(), **rates, **own, comm=comm, named_parameters=named)
        except TypeError as error:
            raise ValueError(f"--method {options.algorithm} takes no such option: {error}") from error
    if options.optimizer == "adam":
        inner: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), **rates)
    else:
        momentum = options.momentum if options.optimizer == "momentum" else 0.0
        inner = torch.optim.SGD(model.parameters(), momentum=momentum, **rates)
    return DistributedOptimizer(
        inner, algorithm, comm, named, options.synchronize, options.local_steps, bucket_mb, islands=islands
    )


def _warm_up(algorithm: Algorithm, comm: Communicator) -> None:
    """Compile the kernels before anything is timed, on a machine where they never ran."""
    n = 8192 * comm.size  # so that every rank merges something
    aggregator = algorithm.start(comm, n)
    for _ in range(2):  # with full-precision rounds and without
        aggregator.aggregate(np.ones(n, np.float32))
