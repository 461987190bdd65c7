"""A small convolutional network in three parts: a client's first block, the server's part, a client's last layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

CHANNELS, WIDE, FEATURES = 8, 16, 64


@dataclass(frozen=True)
class Parts:
    """The network for images of a shape; each part has the same weights wherever it is made from the same seed."""

    image_shape: tuple[int, int, int]
    n_classes: int
    seed: int

    def first(self) -> nn.Module:
        """Images to activations: a row for each channel."""
        torch.manual_seed(self.seed)
        return nn.Sequential(_block(self.image_shape[0], CHANNELS), nn.Flatten(2))

    def middle(self) -> nn.Module:
        """Activations of the first block to features."""
        torch.manual_seed(self.seed + 1)
        height, width = (length // 2 for length in self.image_shape[1:])
        return nn.Sequential(
            nn.Unflatten(2, (height, width)),
            _block(CHANNELS, WIDE),
            nn.Flatten(),
            nn.Linear(WIDE * (height // 2) * (width // 2), FEATURES),
            nn.ReLU(),
        )

    def last(self) -> nn.Module:
        """Features to scores of classes."""
        torch.manual_seed(self.seed + 2)
        return nn.Linear(FEATURES, self.n_classes)


def _block(channels: int, wide: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def mirror(images: Tensor, which: Tensor) -> Tensor:
    """Images of which some are mirrored, left to right."""
    return torch.where(which[:, None, None, None], images.flip(3), images)
