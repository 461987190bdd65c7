"""Data of the examples: Fashion-MNIST from files on this machine, or digits, and a small network for either.

The environment variable FASHION_MNIST names the folder of the four IDX files, plain or gzipped. By default it is the
folder of Debian's package dataset-fashion-mnist. Without that folder, or with FASHION_MNIST=digits, the images are the
handwritten digits that scikit-learn contains, shifted at random and at the size of Fashion-MNIST.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from apps.train.data import FASHION_MNIST_FOLDER, load

DIGITS = "digits"
QUIET_S = 5.0  # between lines that show how far a training is
SIDE, COPIES, SHIFT = 28, 18, 3  # pixels; copies of each digit for training; pixels in each direction


def find_images() -> str:
    """Return the value of FASHION_MNIST that the programs of this machine use."""
    given = os.environ.get("FASHION_MNIST")
    return given or (str(FASHION_MNIST_FOLDER) if FASHION_MNIST_FOLDER.is_dir() else DIGITS)


def images() -> tuple[TensorDataset, TensorDataset]:
    """Return images for training and testing, float32 of shape (1, 28, 28), with labels 0 to 9.

    They are 60,000 and 10,000 of Fashion-MNIST, or 25,866 and 360 digits.
    """
    found = find_images()
    if found == DIGITS:
        if "FASHION_MNIST" not in os.environ:
            from mpi4py import MPI  # which begins MPI: only on ranks, not where they are started

            if MPI.COMM_WORLD.rank == 0:
                print(f"there is no folder {FASHION_MNIST_FOLDER}: learning digits instead", file=sys.stderr)
        data = load(DIGITS)
        test, train = _enlarged(data.test.images), _enlarged(data.train.images)
        return _shifted(train, data.train.labels), TensorDataset(test, data.test.labels)
    if not Path(found).is_dir():
        sys.exit(
            f"there is no folder {found}: name the folder of Fashion-MNIST's four files by FASHION_MNIST, or unset it "
            "to learn digits"
        )
    data = load("fashion-mnist", Path(found))
    return TensorDataset(data.train.images, data.train.labels), TensorDataset(data.test.images, data.test.labels)


class Progress:
    """Lines of rank 0, one at once and then every few seconds, that show how many of the steps are made."""

    def __init__(self, steps: int) -> None:
        self._steps, self._shown_at = steps, 0.0

    def show(self, made: int) -> None:
        """Print a line if it is time for one."""
        from mpi4py import MPI  # as above

        ranks = MPI.COMM_WORLD
        if ranks.rank == 0 and time.monotonic() - self._shown_at >= QUIET_S:
            print(f"{ranks.size} ranks, step {made} of {self._steps}", file=sys.stderr, flush=True)
            self._shown_at = time.monotonic()


def batches(loader: DataLoader[Any], steps: int) -> Iterator[Any]:
    """Yield so many batches, over as many epochs as they need, each in an order of its own."""
    made, progress = 0, Progress(steps)
    for epoch in count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in islice(loader, steps - made):
            progress.show(made)
            made += 1
            yield batch
        if made == steps:
            return


def small_cnn() -> nn.Sequential:
    """Return a network of two convolutions and a linear layer: 20,000 parameters, with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: TensorDataset, most: int = 2000) -> float:
    """Return the fraction of the first `most` images that a model recognises."""
    inputs, labels = images[:most]
    return (model(inputs).argmax(1) == labels).float().mean().item()


def _enlarged(images: Tensor) -> Tensor:
    return nn.functional.interpolate(images, size=SIDE, mode="bilinear")


def _shifted(images: Tensor, labels: Tensor) -> TensorDataset:
    """Return copies of all images, each copy shifted, in an order that is the same every time."""
    random = torch.Generator().manual_seed(0)
    shifts = torch.randint(-SHIFT, SHIFT + 1, (COPIES, 2), generator=random).tolist()
    copies = torch.cat([images.roll(shift, (2, 3)) for shift in shifts])
    order = torch.randperm(len(copies), generator=random)
    return TensorDataset(copies[order], labels.repeat(COPIES)[order])
