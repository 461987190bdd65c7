"""Nested state <-> a flat set of tensors and a JSON text, so that checkpoints need no pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpicomp.checkpoint.tree import join, split


def pack(state: Any) -> tuple[dict[str, Tensor], str]:
    """Split nested dicts, lists and tuples into their tensors, by a running number, and a JSON text of the rest.

    Leaves are tensors, NumPy arrays and scalars, bool, int, float, str and None.

    Raises
    ------
    TypeError
        A leaf is of another type.
    """
    leaves, text = split(state, {"tensor": Tensor, "array": np.ndarray})
    tensors = {}
    for key, leaf in leaves.items():
        tensor = leaf.detach() if isinstance(leaf, Tensor) else torch.from_numpy(leaf)
        tensors[key] = tensor.clone(memory_format=torch.contiguous_format)
    return tensors, text


def unpack(tensors: dict[str, Tensor], text: str) -> Any:
    """Undo `pack`."""
    return join(text, {"tensor": tensors.__getitem__, "array": lambda key: tensors[key].numpy()})
