"""Tensors of batches and messages: their layout, micro-batches of them, and messages made of them and back.

A stage may return one tensor, or tuples, lists and dictionaries of tensors. Trained tensors travel as activations,
coded; the others, such as masks, travel as their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from collectives.annotations import AnyArray, Bytes
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.json_file import fields as require_fields
from collectives.json_file import parse_json
from collectives.quoting import one_line, shown
from mpicomp.codecs.rows.row_codec import Rows
from mpicomp.pipeline.agreement import PipelineError

Arrays: TypeAlias = Sequence[AnyArray]
Tensors: TypeAlias = Any
"""A tensor, or tensors in tuples, lists and dictionaries, with numbers, texts and None between them."""
Structure: TypeAlias = Any
"""JSON: "*" for a tensor, and lists of a kind and its contents."""

_ONE = '"*"'  # structure of a tensor by itself
_GRADIENTS = "gradients"
_MOST_DIGITS = 4000  # of integers among the tensors
_DAMAGED = "the neighbour's announcement of its tensors is damaged"
_CODED = (torch.float32, torch.float16, torch.bfloat16)  # they travel as float32
_PLAIN_TYPES = ("", "float32", "float16", "bfloat16")  # by the number that announces them
_MOST_PLAIN_DIMS = 8
PLAIN_NUMBERS = 2 + _MOST_PLAIN_DIMS


# Layouts --------------------------------------------------------------------------------------------------------------


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
        return self.structure == _ONE

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
        return cls(_ONE, (TensorField(dtype, 4 if dtype == "float32" else 2, shape, True),))

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
            n_tensors = _count_tensors(_read_structure(structure)) if structure != _GRADIENTS else len(fields)
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
    if about["coded"] and dtype not in _CODED:
        raise ValueError(f"tensors of {about['dtype']} are not coded")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{shown(shape)} is no shape")
    return TensorField(about["dtype"], about["item_bytes"], tuple(shape), about["coded"])


def _read_structure(text: str) -> Structure:
    return parse_json(text, most_digits=_MOST_DIGITS, surrogates=True)


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


def _describe(value: Tensors, tensors: list[Tensor]) -> Structure:
    """Return the structure of a value, and append its tensors in order; TypeError names a part of another type."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "*"
    if value is None or isinstance(value, bool | int | float | str):
        return ["constant", value]
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_describe(one, tensors) for one in value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return ["dict", *([key, _describe(one, tensors)] for key, one in value.items())]
    raise TypeError(f"{type(value).__name__}")


def _rebuild(structure: Structure, tensors: Iterator[Tensor]) -> Tensors:
    if structure == "*":
        return next(tensors)
    kind, *parts = structure
    if kind == "constant":
        return parts[0]
    if kind == "dict":
        return {key: _rebuild(one, tensors) for key, one in parts}
    found = [_rebuild(one, tensors) for one in parts]
    return tuple(found) if kind == "tuple" else found


# Batches --------------------------------------------------------------------------------------------------------------


def part_of(value: Tensors, part: slice) -> Tensors:
    """Return some of the examples of a batch: a slice of each of several tensors, or of any other value itself."""
    if not _has_parts(value):
        return value[part]
    found: list[Tensor] = []
    structure = _describe(value, found)
    return _rebuild(structure, iter([one[part] for one in found]))


def examples_of(value: Tensors) -> int:
    """Return the number of examples of a batch; TypeError without examples, ValueError if its tensors differ."""
    if not _has_parts(value):
        return len(value)
    tensors: list[Tensor] = []
    try:
        _describe(value, tensors)
    except TypeError as error:
        raise TypeError(f"a batch has a {error}: pass tensors in tuples, lists or dictionaries") from None
    if not tensors or not all(one.ndim for one in tensors):
        raise TypeError("a batch has no examples: pass tensors with an example in each row")
    sizes = {len(one) for one in tensors}
    if len(sizes) > 1:
        raise ValueError(f"the tensors of a batch have {', '.join(map(str, sorted(sizes)))} examples")
    return sizes.pop()


def _has_parts(value: Tensors) -> bool:
    """Return whether a batch is several tensors, each with all examples; lists are of examples."""
    return isinstance(value, dict) or (
        isinstance(value, tuple) and any(isinstance(one, Tensor | tuple | dict) for one in value)
    )


# Messages -------------------------------------------------------------------------------------------------------------


class Parcel:
    """Output of a slice of the model on its way into a message; PipelineError if it cannot be sent."""

    def __init__(
        self, output: Tensors, examples: int, known: MessageLayout | None = None, evaluating: bool = False
    ) -> None:
        # `coded` has the tensors whose gradients come back; in evaluation none do, and several are sent as bytes
        self._tensors: list[Tensor] = []
        if known is not None and known.is_one_tensor and _is_like(output, examples, known.fields[0]):
            # Nearly all micro-batches: describing them again takes 20 us each.
            self._tensors.append(output)
            self.layout, self.coded = known, self._tensors
            return
        try:
            structure = json.dumps(_describe(output, self._tensors))
        except TypeError as error:
            raise PipelineError(
                f"the stage returns a {error}: let its module return tensors, by themselves or in tuples, lists or "
                "dictionaries"
            ) from None
        if not self._tensors:
            raise PipelineError("the stage returns no tensor: let its module return the inputs of the next one")
        alone = structure == _ONE
        # A mask needs no gradient. Where no tensor does, as in a slice that is not trained, all floats are activations.
        trained = any(one.requires_grad for one in self._tensors)
        fields = []
        for one in self._tensors:
            coded = alone or (not evaluating and one.dtype in _CODED and (one.requires_grad or not trained))
            _check(one, examples, coded)
            fields.append(TensorField(str(one.dtype).removeprefix("torch."), one.itemsize, tuple(one.shape[1:]), coded))
        self.layout = MessageLayout(structure, tuple(fields))
        if known is not None:
            self._fit(known)
        self.coded = [one for one, field in zip(self._tensors, self.layout.fields, strict=True) if field.coded]

    def _fit(self, known: MessageLayout) -> None:
        """Take over which tensors are coded, which must not change while messages are kept."""
        if self.layout.structure != known.structure:
            raise PipelineError(
                f"the stage's output has the structure {self.layout.structure}, and before it had {known.structure}: a "
                "stage must return the same structure of tensors for each micro-batch"
            )
        for tensor, before, field in zip(self._tensors, known.fields, self.layout.fields, strict=True):
            if before.row_shape != field.row_shape:
                raise PipelineError(
                    f"the stage's output has shape {[*tensor.shape]}, and before an example's was "
                    f"{[*before.row_shape]}: a stage must return tensors of one shape per example, so pad its inputs"
                )
            if (tensor.dtype not in _CODED) if before.coded else (field.dtype != before.dtype):
                raise PipelineError(
                    f"the stage's output has a tensor of {tensor.dtype}, and before it was one of {before.dtype}: "
                    "return the same types for each micro-batch"
                )
            if tensor.requires_grad and not before.coded:  # its gradient would be lost
                raise PipelineError(
                    "the stage's output has a tensor that needs a gradient, and before it needed none: make the stage "
                    "again when you begin to train more of it"
                )
        self.layout = known

    def message(self) -> tuple[MessageLayout, Arrays]:
        """Return the message for a link."""
        pairs = zip(self._tensors, self.layout.fields, strict=True)
        return self.layout, [as_rows(one) if field.coded else as_bytes(one) for one, field in pairs]


def unpack(layout: MessageLayout, arrays: Arrays) -> tuple[Tensors, list[Tensor]]:
    """Return the value that a neighbour has sent, and its tensors whose gradients go back."""
    if layout.is_one_tensor:
        alone = torch.from_numpy(arrays[0]).to(getattr(torch, layout.fields[0].dtype)).requires_grad_()
        return alone, [alone]
    tensors, coded = [], []
    for field, values in zip(layout.fields, arrays, strict=True):
        dtype = getattr(torch, field.dtype)
        if field.coded:
            tensors.append(torch.from_numpy(values).to(dtype).requires_grad_())
            coded.append(tensors[-1])
        else:
            tensors.append(torch.from_numpy(values).reshape(-1).view(dtype).reshape(len(values), *field.row_shape))
    return _rebuild(json.loads(layout.structure), iter(tensors)), coded


def as_rows(tensor: Tensor) -> Rows:
    """Return activations, or gradients, as they are coded."""
    return tensor.detach().to(torch.float32).resolve_neg().contiguous().numpy()


def as_bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor; of the tensor's own memory where it is contiguous."""
    found: Bytes = tensor_bytes(tensor).numpy()
    return found


def _is_like(output: Tensors, examples: int, field: TensorField) -> bool:
    """Return whether an output is the one coded tensor that was described before."""
    return isinstance(output, Tensor) and output.dtype in _CODED and output.shape == (examples, *field.row_shape)


def _check(tensor: Tensor, examples: int, coded: bool) -> None:
    if (coded and tensor.dtype not in _CODED) or (tensor.requires_grad and not coded):
        raise PipelineError(
            f"the stage returns a tensor of {tensor.dtype}: let its module return activations of float32, float16 or "
            "bfloat16"
        )
    if tensor.ndim < 1 + coded or len(tensor) != examples:
        raise PipelineError(
            f"the stage returns shape {list(tensor.shape)} for {examples} examples: keep the examples along the first "
            + ("of two or more dimensions" if coded else "dimension")
        )


# States ---------------------------------------------------------------------------------------------------------------


def with_tensors(state: Any) -> Any:
    """Return a state with tensors for arrays, which share their memory: ``torch.load`` reads it with its defaults."""
    if isinstance(state, np.ndarray):
        # PyTorch 2.13 does not unpickle tensors of uint32. Stores take stamps of int32 back.
        return torch.from_numpy(state.view(np.int32) if state.dtype == np.uint32 else state)
    if isinstance(state, Mapping):
        return {key: with_tensors(one) for key, one in state.items()}
    return [with_tensors(one) for one in state] if isinstance(state, list | tuple) else state


def with_arrays(state: Any) -> Any:
    """Return a state with arrays for tensors, which share their memory; arrays of older states are left as they are."""
    if isinstance(state, Tensor):
        return state.detach().cpu().numpy()
    if isinstance(state, Mapping):
        return {key: with_arrays(one) for key, one in state.items()}
    return [with_arrays(one) for one in state] if isinstance(state, list | tuple) else state
