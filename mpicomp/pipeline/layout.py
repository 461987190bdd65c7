"""The tensors of a message: their structure, and the shape and type that each has for an example.

A stage may return one tensor, or tuples, lists and dictionaries of tensors. Tensors that are trained travel as
activations, coded; the others, such as masks, travel as their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

ONE = '"*"'
"""Structure of a tensor by itself."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message.

    Attributes
    ----------
    dtype : str
        PyTorch's name, such as "float32".
    item_bytes : int
    row_shape : tuple of int
        Of an example.
    coded : bool
        It travels as float32 through a codec, and its gradient comes back.
    """

    dtype: str
    item_bytes: int
    row_shape: tuple[int, ...]
    coded: bool

    @property
    def nbytes(self) -> int:
        """Bytes of an example that is not coded."""
        return self.item_bytes * prod(self.row_shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of a message.

    Attributes
    ----------
    structure : str
        JSON: "*" for a tensor, and lists of a kind and its contents.
    fields : tuple of Field
        In the order of the structure.
    """

    structure: str
    fields: tuple[Field, ...]

    @property
    def is_plain(self) -> bool:
        """True for one coded tensor, which is announced in numbers."""
        return self.structure == ONE and self.fields[0].coded

    @property
    def gradients(self) -> Layout:
        """Layout of the message that comes back."""
        return Layout("gradients", tuple(field for field in self.fields if field.coded))

    def text(self) -> str:
        """Return the layout as `read` takes it."""
        return json.dumps([self.structure, [asdict(field) for field in self.fields]])

    @classmethod
    def read(cls, text: str) -> Layout:
        """Return the layout that a neighbour has described."""
        structure, fields = json.loads(text)
        return cls(structure, tuple(Field(**{**one, "row_shape": tuple(one["row_shape"])}) for one in fields))


def describe(value: Any, is_tensor: type, tensors: list[Any]) -> Any:
    """Return the structure of a value as JSON has it, and append its tensors in their order.

    Raises
    ------
    TypeError
        There is something else in it.
    """
    if isinstance(value, is_tensor):
        tensors.append(value)
        return "*"
    if value is None or isinstance(value, bool | int | float | str):
        return ["constant", value]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(describe(one, is_tensor, tensors) for one in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", *([key, describe(one, is_tensor, tensors)] for key, one in value.items())]
    raise TypeError(f"{type(value).__name__}")


def rebuild(structure: Any, tensors: Iterator[Any]) -> Any:
    """Return the value that `describe` has described."""
    if structure == "*":
        return next(tensors)
    kind, *parts = structure
    if kind == "constant":
        return parts[0]
    if kind == "dict":
        return {key: rebuild(one, tensors) for key, one in parts}
    found = [rebuild(one, tensors) for one in parts]
    return tuple(found) if kind == "tuple" else found
