"""Small networks trained by several ranks in one process: what ``apps.train`` does, with threads for processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from apps.records import Record
from apps.reproduce.results import Book
from apps.train.data import Dataset, Split, load
from apps.train.options import parse
from apps.train.training import Training
from collectives import Communicator, NonFiniteGradient
from collectives.threads.run_local import run_local
from mpicomp.algorithms import Algorithm

Watch = Callable[[Communicator, Training], None]
"""Called on every rank after each step that leaves all with the same model; may be collective."""

KEPT = ("epoch", "loss", "accuracy", "test_loss", "bytes_so_far_per_rank", "bits_per_element")


@dataclass(frozen=True)
class Task:
    """What is trained, and how: all but the method and the seed.

    Attributes
    ----------
    options : tuple of str
        Of ``python -m apps.train``, but for method, topology and seed.
    ranks : int
    topology : str
    train_samples, test_samples : int or None
        The first so many of the dataset's; None: all.
    """

    options: tuple[str, ...]
    ranks: int
    topology: str = "ring"
    train_samples: int | None = None
    test_samples: int | None = None

    @property
    def dataset(self) -> Dataset:
        """The images that are trained and tested on."""
        chosen = parse(self.options)
        whole = _loaded(chosen.dataset, chosen.data)
        train, test = _first(whole.train, self.train_samples), _first(whole.test, self.test_samples)
        return Dataset(train, test, whole.n_classes)


def trained(book: Book, name: str, task: Task, method: Algorithm, seed: int, own_options: Sequence[str] = ()) -> Record:
    """What `train` finds, from the book if it is there.

    Parameters
    ----------
    name : str
        Of the record; the seed is added.
    own_options : sequence of str
        Options of ``apps.train`` for this method, such as its learning rate; they come after the task's.
    """
    settings = {
        "options": [*task.options, *own_options],
        "method": repr(method),
        "seed": seed,
        "ranks": task.ranks,
        "topology": task.topology,
        "samples": [task.train_samples, task.test_samples],
    }
    return book.record(f"{name}-{seed}", settings, lambda: train(task, method, seed, own_options))


def train(
    task: Task, method: Algorithm, seed: int, own_options: Sequence[str] = (), watch: Watch | None = None
) -> Record:
    """Train from the seed's model on the seed's order of images; these are the same for all methods.

    Returns
    -------
    dict
        ``epochs``: a record an epoch with the keys `KEPT`; bytes are what a rank sent so far, mean over ranks.
        ``accuracy``: at the end; that of a guess if training diverged. ``diverged``: whether a gradient had NaN or
        infinity. ``count``: trained elements.
    """
    options = parse([*task.options, *own_options, "--seed", str(seed), "--topology", task.topology])
    dataset = task.dataset

    def rank(comm: Communicator) -> Record:
        torch.set_num_threads(1)  # of this thread: the ranks are the parallel part
        training = Training(options, comm, dataset, method)

        def after_step() -> bool:
            if watch is not None:
                watch(comm, training)
            return False

        epochs: list[dict[str, Any]] = []
        try:
            while training.epoch < options.epochs:
                training.train_epoch(after_step)
                record = training.close_epoch()
                epochs.append({key: record[key] for key in KEPT})
        except NonFiniteGradient:
            guess = 1 / dataset.n_classes
            return {"epochs": epochs, "accuracy": guess, "diverged": True, "count": training.n_parameters}
        return {
            "epochs": epochs,
            "accuracy": epochs[-1]["accuracy"],
            "diverged": False,
            "count": training.n_parameters,
        }

    return run_local(task.ranks, rank, task.topology)[0]


@cache
def _loaded(name: str, folder: Any) -> Dataset:
    return load(name, folder)


def _first(split: Split, samples: int | None) -> Split:
    return split if samples is None else Split(split.images[:samples], split.labels[:samples])
