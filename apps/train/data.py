"""Image classification data in memory, and the order in which each rank sees it.

There are three sources: the digits that scikit-learn embeds (1797 images, 8 x 8), Fashion-MNIST (70,000 images,
28 x 28) and any folder of IDX files under their usual names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from apps.train.idx import read_idx

DATASETS = ("digits", "fashion-mnist", "idx")

FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""The folder of Debian's package dataset-fashion-mnist."""

_DIGITS_TEST_SAMPLES = 360


@dataclass(frozen=True, eq=False)
class Split:
    """Images, float32 of shape (samples, channels, height, width), and labels, int64 of shape (samples,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Split:
        """The same on a device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split, both normalised by the mean and the standard deviation of the training split."""

    train: Split
    test: Split
    n_classes: int

    def to(self, device: torch.device | str) -> Dataset:
        """The same on a device."""
        return Dataset(self.train.to(device), self.test.to(device), self.n_classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width


def load(name: str, folder: Path | None = None) -> Dataset:
    """Load "digits", "fashion-mnist" or "idx", from the `folder` of IDX files or Debian's of Fashion-MNIST.

    Files that are missing, damaged or inconsistent raise ValueError, which names the file, the cause and the cure.
    """
    if name == "digits":
        return _load_digits()
    if folder is None:
        if name != "fashion-mnist":
            raise ValueError("--dataset idx needs --data DIR, the folder with the four IDX files")
        folder = FASHION_MNIST_FOLDER
    if not folder.is_dir():
        cure = "install Debian's package dataset-fashion-mnist or name its folder with --data DIR"
        raise ValueError(f"there is no folder {folder}; {cure if name == 'fashion-mnist' else 'correct --data DIR'}")
    train, test = _read_split(folder, "train"), _read_split(folder, "t10k")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise ValueError(
            f"{folder}: training images are {train[0].shape[1:]} and test images {test[0].shape[1:]} pixels; "
            "put files of one dataset there"
        )
    return _normalised(*train, *test)


class Sampler:
    """Distributes the training split over the ranks, in a new order in each epoch.

    The order depends on seed and epoch alone. Global batch k is the same set of images for every topology; rank r
    takes the r-th part of it, `batch` images. The images beyond the last whole global batch are left out of the epoch;
    fewer images than one global batch raise ValueError.
    """

    def __init__(self, n_samples: int, batch: int, rank: int, size: int, seed: int) -> None:
        if n_samples < batch * size:
            raise ValueError(
                f"{n_samples} training images do not fill one batch of {batch} on each of {size} ranks; lower --batch"
            )
        self.global_batch = batch * size
        self.n_steps = n_samples // self.global_batch
        self._n_samples, self._batch, self._rank, self._size, self._seed = n_samples, batch, rank, size, seed

    def epoch(self, epoch: int) -> Tensor:
        """Image indices of an epoch on one rank: int64 of shape (steps, batch)."""
        order = epoch_order(self._n_samples, self._seed, epoch)
        batches = order[: self.n_steps * self.global_batch].view(self.n_steps, self._size, self._batch)
        return batches[:, self._rank].clone()


def epoch_order(n_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch's images: int64 of shape (samples,)."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(n_samples))


def _load_digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("the digits come with scikit-learn, which is missing; pip install scikit-learn") from error
    bunch = load_digits()
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(bunch.target))
    images, labels = bunch.images[order], bunch.target[order]
    n = _DIGITS_TEST_SAMPLES
    return _normalised(images[n:], labels[n:], images[:n], labels[:n])


def _read_split(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    images_path = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} holds {len(images)} images but {labels_path.name} {len(labels)} labels; "
            "put files of one dataset there"
        )
    if not images.size:
        raise ValueError(f"{images_path} holds no images; put a dataset with at least one there")
    return images, labels


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"{folder} has neither {name} nor {name}.gz; put the dataset's four IDX files there")


def _normalised(
    train_images: np.ndarray, train_labels: np.ndarray, test_images: np.ndarray, test_labels: np.ndarray
) -> Dataset:
    mean, std = float(train_images.mean()), float(train_images.std()) or 1.0

    def split(images: np.ndarray, labels: np.ndarray) -> Split:
        pixels = ((images.astype(np.float32) - mean) / std)[:, np.newaxis]
        return Split(torch.from_numpy(pixels), torch.from_numpy(labels.astype(np.int64)))

    n_classes = int(max(train_labels.max(), test_labels.max())) + 1
    return Dataset(split(train_images, train_labels), split(test_images, test_labels), n_classes)
