"""Data of the examples: Fashion-MNIST from files on this machine, and a small network for it.

The environment variable FASHION_MNIST names the folder of the four IDX files, plain or gzipped. By default it is the
folder of Debian's package dataset-fashion-mnist.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from apps.train.data import FASHION_MNIST_FOLDER, load

SOURCE = "https://github.com/zalandoresearch/fashion-mnist"


def fashion_mnist() -> tuple[TensorDataset, TensorDataset]:
    """Return 60,000 images for training and 10,000 for testing, float32 of shape (1, 28, 28), with labels 0 to 9."""
    folder = Path(os.environ.get("FASHION_MNIST", FASHION_MNIST_FOLDER))
    if not folder.is_dir():
        sys.exit(
            f"there is no folder {folder}: install Debian's package dataset-fashion-mnist, or fetch the four files of "
            f"Fashion-MNIST from {SOURCE} and name their folder by FASHION_MNIST"
        )
    data = load("fashion-mnist", folder)
    return TensorDataset(data.train.images, data.train.labels), TensorDataset(data.test.images, data.test.labels)


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
