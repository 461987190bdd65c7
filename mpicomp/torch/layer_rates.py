"""Compression rates of layers, from the multiply-adds that are made for each of their gradients.

    ratio = multiply-adds of the layer in a rank's mini-batch / (its gradient elements * 32)

A layer whose weights are used often for one example, such as a convolution over a large image, has gradients that are
worth more: ratio 196 or more: 25 times; above 128: 50 times; 128 or less: 400 times. The 32 makes it the guidance's
mini-batch per rank: 32 images or utterances, or 4.5 thousand tokens as 32 sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

EXAMPLES = 32
LOW, MIDDLE, HIGH = 25, 50, 400
_FROM, _ABOVE = 196.0, 128.0


def rate_of(ratio: float) -> int:
    """Return the number of elements per element that is sent, for this ratio of multiply-adds to gradients."""
    return LOW if ratio >= _FROM else MIDDLE if ratio > _ABOVE else HIGH


def flops_to_gradient(model: nn.Module, inputs: Sequence[object]) -> dict[str, float]:
    """Return the ratio of each trainable parameter of `model`.

    Parameters
    ----------
    model, inputs
        As in `compression_rates`.

    Returns
    -------
    dict
        By the names of ``model.named_parameters()``. A module's own parameters share its ratio: multiply-adds outside
        of its submodules, over the number of the parameters' elements. Matrix products, convolutions and attention
        count; the ratio of a module without any of these, such as a norm, or an embedding, is 0.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs)
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    top = type(model).__name__
    ratios: dict[str, float] = {}
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(prefix=name, recurse=False) if p.requires_grad}
        if not own:
            continue
        inside = (f"{name}.{child}" if name else child for child, _ in module.named_children())
        flops = _of(counts, top, name) - sum(_of(counts, top, child) for child in inside)
        elements = sum(parameter.numel() for parameter in own.values())
        ratios.update(dict.fromkeys(own, flops / 2 / (max(1, elements) * EXAMPLES)))
    return ratios


def _of(counts: Mapping[str, int], top: str, name: str) -> int:
    """Return the operations counted in a module; the counter puts the model's class before its submodules' names."""
    return counts.get(f"{top}.{name}" if name else top, 0)


def compression_rates(model: nn.Module, inputs: Sequence[object]) -> dict[str, int]:
    """Return a rate for each trainable parameter: elements per element that is sent.

    Vectors of a module in which nothing is counted, such as a norm's, get the lowest: there is little of them to save.

    Parameters
    ----------
    model : Module
        Called once, without gradients, in its current mode.
    inputs : sequence
        Arguments of the model: a rank's mini-batch of the size that it will be trained with.

    Returns
    -------
    dict of int
        25, 50 or 400, by the names of ``model.named_parameters()``.

    References
    ----------
    Chen et al., "ScaleCom", NeurIPS 2020 (arXiv 2104.11125), section 4.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch.layer_rates import compression_rates
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 10))
    >>> rates = compression_rates(model, [torch.zeros(32, 3, 32, 32)])
    >>> rates["0.weight"], rates["2.weight"]
    (25, 400)
    >>> choose = lambda name, parameter: mpicomp.ScaleCom(rate=rates[name])  # for DistributedOptimizer
    """
    ratios = flops_to_gradient(model, inputs)
    parameters = dict(model.named_parameters())
    few = {name for name, ratio in ratios.items() if not ratio and parameters[name].ndim < 2}
    return {name: LOW if name in few else rate_of(ratio) for name, ratio in ratios.items()}
