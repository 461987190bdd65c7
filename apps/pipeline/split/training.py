"""Rounds of split learning, in each of which every client has a turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apps.pipeline.split.network import Parts, mirror
from apps.pipeline.split.options import Options
from apps.pipeline.split.partition import dirichlet
from apps.records import Record
from apps.train.data import FASHION_MNIST_FOLDER, Dataset, load
from collectives import Communicator
from mpicomp.pipeline import SplitClient, SplitServer

SERVER = 0
TESTED_TOGETHER = 250


def images_of(options: Options) -> Dataset:
    """The images that the options name; ValueError where they cannot be had."""
    found = "fashion-mnist" if FASHION_MNIST_FOLDER.is_dir() else "digits"
    return load(options.dataset or found, None if options.data is None else Path(options.data))


class Training:
    """A run on this rank, as the server, on rank 0, or as its clients."""

    def __init__(self, options: Options, comm: Communicator, dataset: Dataset) -> None:
        self.options, self._comm, self._dataset = options, comm, dataset
        taken = np.random.default_rng([options.seed, 0]).permutation(len(dataset.train))[: options.examples]
        labels = dataset.train.labels.numpy()[taken]
        shares = dirichlet(labels, options.clients, options.concentration, np.random.default_rng([options.seed, 1]))
        self.examples = [taken[share] for share in shares]
        self.round = 0
        variants = 2 if options.flip else 1
        forward = options.forward(variants * max(len(one) for one in self.examples))
        travel: dict[str, Any] = {"forward": forward, "backward": options.backward(), "seed": options.seed}
        parts = Parts(dataset.image_shape, dataset.n_classes, options.seed)
        self.party: SplitClient | SplitServer
        if comm.rank == SERVER:
            middle = parts.middle()
            self.party = SplitServer(middle, comm, options.clients, **travel)
            self._optimizer = self._sgd(middle)
        else:
            first, last = parts.first(), parts.last()
            self._layers = nn.ModuleList([first, last])
            loss = nn.functional.cross_entropy
            self.party = SplitClient(first, last, comm, options.clients, loss=loss, **travel)

    def train_round(self, after_turn: Callable[[], None] = lambda: None) -> Record:
        """Give every client its turn, and test the model; returns the findings, on every rank."""
        start, before = time.perf_counter(), self.party.bytes_sent
        losses = list[float]()
        for client in range(self.options.clients):
            with self.party.turn(client) as takes_part:
                if isinstance(self.party, SplitServer):
                    self._serve(self.party)
                elif takes_part:
                    losses += self._train(self.party, client)
            after_turn()
        sent = np.subtract(self.party.bytes_sent, before).sum()
        seconds, rate = time.perf_counter() - start, self.options.rate(self.round)
        self.round += 1
        right = self._test(self.options.clients - 1)
        up, down = (0, sent) if self._comm.rank == SERVER else (sent, 0)
        found = np.asarray(self._comm.allreduce(np.array([sum(losses), len(losses), right, up, down], np.float64)))
        return {
            "round": self.round,
            "lr": rate,
            "loss": float(found[0] / found[1]),
            "test_accuracy": float(found[2] / self._tested),
            "bytes_up": int(found[3]),
            "bytes_down": int(found[4]),
            "seconds": seconds,
        }

    def _serve(self, server: SplitServer) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.rate(self.round)
        while server.serve():
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _train(self, clients: SplitClient, client: int) -> list[float]:
        """A turn of a client here; its momentum begins from scratch, as if each had a machine of its own."""
        optimizer = self._sgd(self._layers)
        losses = []
        for ids, images, labels in self._batches(client):
            losses.append(clients.step(images, labels, ids))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def _batches(self, client: int) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
        """Ids, images and labels of the batches of a turn, the same wherever the client is."""
        examples, train = self.examples[client], self._dataset.train
        generator = np.random.default_rng([self.options.seed, 2, self.round, client])
        for _ in range(self.options.local_epochs):
            order = generator.permutation(len(examples))
            for ids in np.split(order, range(self.options.batch, len(order), self.options.batch)):
                rows = torch.from_numpy(examples[ids])
                images, labels = train.images[rows], train.labels[rows]
                if self.options.flip:
                    mirrored = generator.integers(2, size=len(ids))
                    images, ids = mirror(images, torch.from_numpy(mirrored == 1)), 2 * ids + mirrored
                yield ids, images, labels

    def _sgd(self, layers: nn.Module) -> torch.optim.Optimizer:
        rate = self.options.rate(self.round)
        return torch.optim.SGD(layers.parameters(), lr=rate, momentum=self.options.momentum)

    @property
    def _tested(self) -> int:
        return min(self.options.test_examples, len(self._dataset.test))

    def _test(self, client: int) -> int:
        """Count the test images that this rank's client recognises, with the weights that it has now."""
        right = 0
        with self.party.turn(client) as takes_part:
            if isinstance(self.party, SplitServer):
                self.party.serve()
            elif takes_part:
                for start in range(0, self._tested, TESTED_TOGETHER):
                    part = slice(start, min(start + TESTED_TOGETHER, self._tested))
                    found = self.party.predict(self._dataset.test.images[part]).argmax(1)
                    right += int((found == self._dataset.test.labels[part]).sum())
        return right


def train(
    options: Options, comm: Communicator, dataset: Dataset, after_round: Callable[[Record], None] = lambda _: None
) -> Record:
    """Train with these options; returns the record of the run, on every rank; collective."""
    training = Training(options, comm, dataset)
    rounds = []
    for _ in range(options.rounds):
        rounds.append(training.train_round())
        after_round(rounds[-1])
    training.party.close()
    sizes = [len(examples) for examples in training.examples]
    return {"name": options.name, "options": asdict(options), "client_examples": sizes, "rounds": rounds}
