"""Layout of the tensors of a message, which the sender announces: their structure, types and shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collectives.json_file import fields as require_fields
from collectives.json_file import parse_json
from collectives.quoting import one_line, shown

Tensors: TypeAlias = Any
"""A tensor, or tensors in tuples, lists and dictionaries, with numbers, texts and None between them."""
Structure: TypeAlias = Any
"""JSON: "*" for a tensor, and lists of a kind and its contents."""

ONE = '"*"'  # structure of a tensor by itself
_GRADIENTS = "gradients"
_MOST_DIGITS = 4000  # of integers among the tensors
_DAMAGED = "the neighbour's announcement of its tensors is damaged"
CODED = (torch.float32, torch.float16, torch.bfloat16)  # they travel as float32
_PLAIN_TYPES = ("", "float32", "float16", "bfloat16")  # by the number that announces them
_MOST_PLAIN_DIMS = 8
PLAIN_NUMBERS = 2 + _MOST_PLAIN_DIMS


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of a message."""

    dtype: str  # PyTorch's name, such as "float32"
    item_bytes: int
    row_shape: tuple[int, ...]  # of an example
    coded: bool  # the tensor travels as float32 through a codec, and its gradient comes back

    @property
    def nbytes(self) -> int:
        """Bytes of an example that is not coded."""
        return self.item_bytes * prod(self.row_shape)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """All tensors of a message."""

    structure: str  # text of a `Structure`
    fields: tuple[TensorField, ...]  # in the order of the structure

    @property
    def is_one_tensor(self) -> bool:
        """True if the message is a tensor by itself."""
        return self.structure == ONE

    @property
    def gradients(self) -> MessageLayout:
        """Layout of the message that comes back."""
        return MessageLayout(_GRADIENTS, tuple(field for field in self.fields if field.coded))

    def numbers(self) -> list[int] | None:
        """Return the announcement of one coded tensor: its type, dimensions and their lengths; None for others."""
        shape = self.fields[0].row_shape if self.fields else ()
        if not self.is_one_tensor or not self.fields[0].coded or len(shape) > _MOST_PLAIN_DIMS:
            return None
        return [_PLAIN_TYPES.index(self.fields[0].dtype), len(shape), *shape]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> MessageLayout:
        """Return the layout that a neighbour has announced by `numbers`; ValueError if they announce none."""
        kind, n_dims = numbers[:2]
        lengths = numbers[2 : 2 + max(0, n_dims)]
        if not 0 < kind < len(_PLAIN_TYPES) or not 0 <= n_dims <= _MOST_PLAIN_DIMS or min(lengths, default=0) < 0:
            raise ValueError(f"{_DAMAGED}: {numbers}")
        dtype, shape = _PLAIN_TYPES[numbers[0]], tuple(numbers[2 : 2 + numbers[1]])
        return cls(ONE, (TensorField(dtype, 4 if dtype == "float32" else 2, shape, True),))

    def text(self) -> str:
        """Return the announcement of any layout."""
        return json.dumps([self.structure, [asdict(field) for field in self.fields]])

    @classmethod
    def from_text(cls, text: str | bytes) -> MessageLayout:
        """Return the layout that a neighbour has announced by `text`; ValueError if it announces none."""
        try:
            match parse_json(text if isinstance(text, str) else text.decode(), surrogates=True):
                case [str() as structure, list() as described]:
                    fields = tuple(map(_field, described))
                case _:
                    raise ValueError("it is no pair of a structure and tensors")
            n_tensors = len(fields)
            if structure != _GRADIENTS:
                n_tensors = _count_tensors(parse_json(structure, most_digits=_MOST_DIGITS, surrogates=True))
            if n_tensors != len(fields):
                raise ValueError(f"its structure has {n_tensors} tensors, and {len(fields)} are described")
        except ValueError as error:
            raise ValueError(f"{_DAMAGED}: {one_line(error)}") from error
        return cls(structure, fields)


def _field(found: Any) -> TensorField:
    """Return the description of a tensor; ValueError for any other value."""
    about = require_fields(found, dtype=str, item_bytes=int, row_shape=list, coded=bool)
    dtype, shape = getattr(torch, about["dtype"], None), about["row_shape"]
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != about["item_bytes"]:
        raise ValueError(f"it has no type {shown(about['dtype'])} of {about['item_bytes']} bytes")
    if about["coded"] and dtype not in CODED:
        raise ValueError(f"tensors of {about['dtype']} are not coded")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{shown(shape)} is no shape")
    return TensorField(about["dtype"], about["item_bytes"], tuple(shape), about["coded"])


def _count_tensors(structure: Structure) -> int:
    """Return the number of tensors of a structure; ValueError for any other value."""
    match structure:
        case "*":
            return 1
        case ["constant", None | bool() | int() | float() | str()]:
            return 0
        case ["tuple" | "list", *parts]:
            return sum(map(_count_tensors, parts))
        case ["dict", *pairs] if all(isinstance(one, list) and len(one) == 2 and type(one[0]) is str for one in pairs):
            return sum(_count_tensors(one) for _, one in pairs)
    raise ValueError(f"{shown(structure)} is no structure of tensors")


def describe(value: Tensors, tensors: list[Tensor]) -> Structure:
    """Return the structure of a value, and append its tensors in order; TypeError names a part of another type."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "*"
    if value is None or isinstance(value, bool | int | float | str):
        return ["constant", value]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(describe(one, tensors) for one in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", *([key, describe(one, tensors)] for key, one in value.items())]
    raise TypeError(f"{type(value).__name__}")


def rebuild(structure: Structure, tensors: Iterator[Tensor]) -> Tensors:
    """Return the value with this structure, which takes its tensors from an iterator."""
    if structure == "*":
        return next(tensors)
    kind, *parts = structure
    if kind == "constant":
        return parts[0]
    if kind == "dict":
        return {key: rebuild(one, tensors) for key, one in parts}
    found = [rebuild(one, tensors) for one in parts]
    return tuple(found) if kind == "tuple" else found
