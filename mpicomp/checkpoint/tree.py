"""Nested states as arrays and a JSON text of the rest, so that storing them needs no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from collectives.json_file import parse_json
from collectives.quoting import shown

# A dict is three levels of the text, and Python's stack ends before a state of a thousand dicts within each other.
MOST_DEPTH = 3000
MOST_DIGITS = 64  # random generators have integers of 39


def split(state: object, kinds: Mapping[str, type]) -> tuple[dict[str, Any], str]:
    """Split nested dicts, lists and tuples into leaves of some types, by a running number, and a text of the rest.

    Parameters
    ----------
    state
        Its other leaves are bool, int, float, str, None and NumPy scalars.
    kinds
        Types of the leaves that are taken out, by their names in the text; not "dict" or "tuple".

    Raises
    ------
    TypeError
        A leaf is of another type.
    ValueError
        An integer has more digits than `join` takes.
    """
    leaves: dict[str, Any] = {}

    def encode(value: object) -> object:
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
            case int() if abs(value) >= 10**MOST_DIGITS:
                raise ValueError(f"cannot pack an integer of more than {MOST_DIGITS} digits into a checkpoint")
            case None | bool() | int() | float() | str():
                return value
        raise TypeError(f"cannot pack a {type(value).__name__} into a checkpoint")

    return leaves, json.dumps(encode(state))


def join(text: str, leaves: Mapping[str, Callable[[str], object]]) -> Any:
    """Undo `split`.

    Parameters
    ----------
    text : str
    leaves : dict
        For each kind, a function that returns the leaf of a number, or raises KeyError.

    Raises
    ------
    ValueError
        `split` did not write this text, or a leaf is missing; one line.
    """

    def decode(value: object) -> Any:
        if isinstance(value, list):
            return [decode(one) for one in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ValueError(f"{shown(value)} is neither a value nor a place of one")
        ((kind, held),) = value.items()
        match kind, held:
            case "dict", list() if all(isinstance(pair, list) and len(pair) == 2 for pair in held):
                return _dict([(decode(key), decode(one)) for key, one in held])
            case "tuple", list():
                return tuple(decode(one) for one in held)
            case str(), str() if kind in leaves:
                try:
                    return leaves[kind](held)
                except KeyError as error:
                    raise ValueError(f"the {kind} {shown(held)} is missing") from error
        raise ValueError(f"{shown(value)} is no value of a state")

    try:
        return decode(parse_json(text, most_depth=MOST_DEPTH, most_digits=MOST_DIGITS, surrogates=True))
    except RecursionError as error:
        raise ValueError("the text is nested too deep") from error


def _dict(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        made = dict(items)
    except TypeError as error:
        raise ValueError(f"a key is a list, a dict or an array ({error})") from error
    if len(made) != len(items):
        raise ValueError("a key occurs more than once in a dict")
    return made
