"""Nested state <-> its arrays and a JSON text of the rest, so that storing it needs no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def split(state: Any, kinds: Mapping[str, type]) -> tuple[dict[str, Any], str]:
    """Take nested dicts, lists and tuples apart: leaves of some types, by a running number, and a text of the rest.

    Parameters
    ----------
    state
        Its other leaves are bool, int, float, str, None and NumPy scalars.
    kinds
        Types of the leaves that are to be taken out, and what the text calls them; not "dict" or "tuple".

    Raises
    ------
    TypeError
        A leaf is of another type.
    """
    leaves: dict[str, Any] = {}

    def encode(value: Any) -> Any:
        for kind, of_type in kinds.items():
            if isinstance(value, of_type):
                key = str(len(leaves))
                leaves[key] = value
                return {kind: key}
        match value:
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

    return leaves, json.dumps(encode(state))


def join(text: str, leaves: Mapping[str, Callable[[str], Any]]) -> Any:
    """Undo `split`; `leaves` gives, for each kind, the leaf of a number."""

    def decode(value: Any) -> Any:
        match value:
            case {"dict": items}:
                return {decode(k): decode(v) for k, v in items}
            case {"tuple": items}:
                return tuple(decode(v) for v in items)
            case dict():
                ((kind, key),) = value.items()
                return leaves[kind](key)
            case list():
                return [decode(v) for v in value]
        return value

    return decode(json.loads(text))
