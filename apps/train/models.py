"""Image classifiers that fit the size of their images, such as 8 x 8 digits and 28 x 28 garments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

ImageShape = tuple[int, int, int]


def mlp(shape: ImageShape, n_classes: int, hidden: Sequence[int], width: int | None) -> nn.Module:
    """Fully connected layers of `hidden` units each, with ReLU between."""
    if width is not None:
        raise ValueError("--width scales convolutions, but --model mlp has none; use --hidden")
    return nn.Sequential(nn.Flatten(), *_classifier(math.prod(shape), hidden, n_classes))


def cnn(shape: ImageShape, n_classes: int, hidden: Sequence[int], width: int | None) -> nn.Module:
    """Two convolutions of `width` (default 16) and twice as many channels, each pooled, then the classifier."""
    channels, height, columns = shape
    w = width or 16
    features = [*_convolution(channels, w), nn.MaxPool2d(2), *_convolution(w, 2 * w), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, *_classifier(2 * w * (height // 4) * (columns // 4), hidden, n_classes))


def alexnet(shape: ImageShape, n_classes: int, hidden: Sequence[int], width: int | None) -> nn.Module:
    """AlexNet for small images: five convolutions, the first with `width` (default 64) channels, and dropout."""
    channels, height, columns = shape
    w = width or 64
    features = [
        *_convolution(channels, w),
        nn.MaxPool2d(2),
        *_convolution(w, 3 * w),
        nn.MaxPool2d(2),
        *_convolution(3 * w, 6 * w),
        *_convolution(6 * w, 4 * w),
        *_convolution(4 * w, 4 * w),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
    ]
    return nn.Sequential(*features, *_classifier(4 * w * (height // 8) * (columns // 8), hidden, n_classes))


def resnet(n_blocks: int, shape: ImageShape, n_classes: int, hidden: Sequence[int], width: int | None) -> nn.Module:
    """ResNets for small images (He et al., 2016, section 4.2): three stages; the first has `width` (16) channels."""
    w = width or 16
    blocks: list[nn.Module] = []
    for n_inputs, n_outputs, stride in ((w, w, 1), (w, 2 * w, 2), (2 * w, 4 * w, 2)):
        blocks += [_Block(n_inputs, n_outputs, stride), *(_Block(n_outputs, n_outputs, 1) for _ in range(n_blocks - 1))]
    stem = [nn.Conv2d(shape[0], w, 3, padding=1, bias=False), nn.BatchNorm2d(w), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *_classifier(4 * w, hidden, n_classes)]
    return nn.Sequential(*stem, *blocks, *head)


MODELS: dict[str, Callable[[ImageShape, int, Sequence[int], int | None], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet": alexnet,
    "resnet8": partial(resnet, 1),
    "resnet20": partial(resnet, 3),
}


def build(name: str, shape: ImageShape, n_classes: int, hidden: Sequence[int] | None, width: int | None) -> nn.Module:
    """Build one of `MODELS` for images of `shape`: channels, height and width.

    An option that does not apply, and images that are too small for the model's pooling, raise ValueError.

    Parameters
    ----------
    hidden
        Units of the fully connected layers before the last. None stands for (128,) with the MLP, else for no layers.
    width
        Channels of the first convolution. None stands for the default of the model.
    """
    smallest = {"cnn": 4, "alexnet": 8}.get(name, 1)
    if min(shape[1:]) < smallest:
        raise ValueError(
            f"images of {shape[1]} x {shape[2]} pixels are too small for --model {name}, which needs {smallest} x "
            f"{smallest}; use --model mlp"
        )
    if hidden is None:
        hidden = (128,) if name == "mlp" else ()
    return MODELS[name](shape, n_classes, hidden, width)


class _Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is subsampled and padded with zeros if shapes differ."""

    def __init__(self, n_inputs: int, n_outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.n_new = stride, n_outputs - n_inputs
        self.conv1 = nn.Conv2d(n_inputs, n_outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_outputs)
        self.conv2 = nn.Conv2d(n_outputs, n_outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.n_new:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.n_new))
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(inner)) + shortcut)


def _convolution(n_inputs: int, n_outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(n_inputs, n_outputs, 3, padding=1), nn.ReLU()]


def _classifier(n_features: int, hidden: Sequence[int], n_classes: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for n_units in hidden:
        layers += [nn.Linear(n_features, n_units), nn.ReLU()]
        n_features = n_units
    return [*layers, nn.Linear(n_features, n_classes)]
