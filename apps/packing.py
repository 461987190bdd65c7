"""Nested state <-> a flat set of tensors and a JSON text, so that checkpoints need no pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pack(state: Any) -> tuple[dict[str, Tensor], str]:
    """Split nested dicts, lists and tuples into their tensors, by a running number, and a JSON text of the rest.

    Leaves are tensors, NumPy arrays and scalars, bool, int, float, str and None.

    Raises
    ------
    TypeError
        A leaf is of another type.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any) -> Any:
        match value:
            case Tensor() | np.ndarray():
                key = str(len(tensors))
                tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(value)
                tensors[key] = tensor.clone(memory_format=torch.contiguous_format)
                return {"tensor" if isinstance(value, Tensor) else "array": key}
            case np.generic():
                return encode(value.item())
            case dict():
                return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
            case tuple():
                return {"tuple": [encode(v) for v in value]}
            case list():
                return [encode(v) for v in value]
            case None | bool() | int() | float() | str():
                return value
        raise TypeError(f"cannot pack a {type(value).__name__} into a checkpoint")

    return tensors, json.dumps(encode(state))


def unpack(tensors: dict[str, Tensor], text: str) -> Any:
    """Undo `pack`."""

    def decode(value: Any) -> Any:
        match value:
            case {"tensor": key}:
                return tensors[key]
            case {"array": key}:
                return tensors[key].numpy()
            case {"dict": items}:
                return {decode(k): decode(v) for k, v in items}
            case {"tuple": items}:
                return tuple(decode(v) for v in items)
            case list():
                return [decode(v) for v in value]
        return value

    return decode(json.loads(text))
