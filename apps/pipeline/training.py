"""Train one stage of one replica: the same loop on every rank of the grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from apps.pipeline.magnitudes import Magnitudes
from apps.pipeline.model import load_weights, loss, slice_of
from apps.pipeline.options import FULL, Options
from apps.pipeline.text import Corpus
from collectives import Communicator
from mpicomp import Dense
from mpicomp.pipeline import PipelineStage
from mpicomp.torch import DistributedOptimizer, OneBitAdam

EVALUATED = 32  # sequences at once
Record = dict[str, Any]


class Training:
    """A rank's part of a run; every method is collective over all ranks of the grid."""

    def __init__(
        self,
        options: Options,
        comm: Communicator,
        corpus: Corpus,
        folder: Path | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        # options and corpus are the same on all ranks; the folder is for files of ``store="disk"``, and weights are
        # those of the whole model, to begin with
        self.options, self._comm, self._corpus = options, comm, corpus
        self.grid = comm.grid(replica=options.replicas, stage=options.stages)
        self._stages, self._replicas = self.grid.along("stage"), self.grid.along("replica")
        self.replica, self._stage = self._replicas.rank, self._stages.rank
        self._own = np.arange(self._replicas.rank, len(corpus.training), options.replicas)
        self._own = self._own[: len(corpus.training) // options.replicas]
        self.steps_per_epoch = self._own.size // options.batch
        if not self.steps_per_epoch:
            raise ValueError(
                f"{len(corpus.training)} sequences are too few for a step of {options.replicas} x {options.batch}: "
                "raise --characters or lower --batch"
            )
        self.model = slice_of(options.shape, self._stage, options.stages, options.seed)
        if weights is not None:
            load_weights(self.model, weights)
        stores = None if folder is None else folder / f"replica-{self.replica}"
        if stores is not None and options.store == "disk":
            stores.mkdir(parents=True, exist_ok=True)
        self.stage = PipelineStage(
            self.model,
            self._stages,
            options.micro_batches,
            loss=loss if self._stage == options.stages - 1 else None,
            schedule=options.schedule,
            forward=options.forward(self._own.size, stores),
            backward=options.backward(),
            seed=options.seed + 1000 * self.replica,
            everyone=comm if options.replicas > 1 else None,
        )
        self.optimizer = self._optimizer()
        steps = options.epochs * self.steps_per_epoch
        rising = max(1, round(options.warm_up * steps))
        self._schedule = LambdaLR(
            self.optimizer, lambda step: min((step + 1) / rising, max(steps - step, 0) / max(steps - rising, 1))
        )
        self.epoch, self.losses = 0, list[float]()
        self.magnitudes = Magnitudes(self.model, self._own.size) if options.magnitudes and not self._stage else None

    def _optimizer(self) -> torch.optim.Optimizer:
        options, parameters = self.options, self.model.parameters()
        if options.gradient_bits != FULL:
            return OneBitAdam(
                parameters, options.lr, bits=options.gradient_bits, warmup_steps=self.steps_per_epoch,
                comm=self._replicas, named_parameters=self.model.named_parameters(), seed=options.seed,
            )  # fmt: skip
        adam = torch.optim.Adam(parameters, options.lr)
        if options.replicas == 1:
            return adam
        return DistributedOptimizer(
            adam, Dense(), self._replicas, self.model.named_parameters(),
            backward_passes_per_step=options.micro_batches,
        )  # fmt: skip

    def train_epoch(self, after_step: Callable[[], None] = lambda: None) -> Record:
        """Train an epoch and evaluate the model; returns the findings."""
        start, before = time.perf_counter(), self.stage.bytes_sent
        self.model.train()
        order = np.random.default_rng([self.options.seed, self.epoch]).permutation(self._own.size)
        found = [self._step(ids, after_step) for ids in self._batches(order)]
        training_s = time.perf_counter() - start
        sent = self._comm.allreduce(np.subtract(self.stage.bytes_sent, before).astype(np.float64))
        self.epoch += 1
        validation = self.evaluate()
        return {
            "epoch": self.epoch,
            "loss": float(np.mean(found)),
            "validation_loss": validation,
            "perplexity": float(np.exp(validation)),
            "seconds": training_s,
            "bytes_forward": int(sent[0]),
            "bytes_backward": int(sent[1]),
        }

    def _step(self, ids: NDArray[np.int64], after_step: Callable[[], None]) -> float:
        sequences = torch.from_numpy(self._corpus.training[self._own[ids]])
        self.optimizer.zero_grad()
        with nullcontext() if self.magnitudes is None else self.magnitudes.of(ids):
            found = self.stage.step(sequences[:, :-1], sequences[:, 1:], ids)
        self.optimizer.step()
        self._schedule.step()
        mean = float(self._replicas.allreduce(found, op="mean"))
        self.losses.append(mean)
        after_step()
        return mean

    def _batches(self, order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return np.split(order[: self.steps_per_epoch * self.options.batch], self.steps_per_epoch)

    def evaluate(self) -> float:
        """Mean validation loss of a character, with activations in full precision."""
        held_out = torch.from_numpy(self._corpus.validation)
        self.model.eval()
        total = sum(
            len(part) * self.stage.evaluate(part[:, :-1], part[:, 1:]) for part in torch.split(held_out, EVALUATED)
        )
        return total / len(held_out)

    def close(self) -> None:
        """Close the grid and the stores."""
        self.stage.close()
        self.grid.close()

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> Record:
        """All that this rank needs to go on."""
        return {
            "epoch": self.epoch,
            "losses": list(self.losses),
            "module": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "stage": self.stage.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.model.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.stage.load_state_dict(state["stage"])
        self.epoch, self.losses = state["epoch"], list(state["losses"])

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters of the whole model, of the first replica; collective."""
        slices = self._stages.allgather_object({name: one.numpy() for name, one in self.model.state_dict().items()})
        return {name: torch.from_numpy(one) for part in slices for name, one in part.items()}
