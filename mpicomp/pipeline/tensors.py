"""Tensors of batches and messages: micro-batches of them, and messages made of them and back.

A stage may return one tensor, or tuples, lists and dictionaries of tensors. Trained tensors travel as activations,
coded; the others, such as masks, travel as their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from collectives.annotations import AnyArray, Bytes
from collectives.arrays.tensor_bytes import tensor_bytes
from mpicomp.codecs.rows.row_codec import Rows
from mpicomp.pipeline.agreement import PipelineError
from mpicomp.pipeline.message_layout import CODED, ONE, MessageLayout, TensorField, Tensors, describe, rebuild

Arrays: TypeAlias = Sequence[AnyArray]


# Batches --------------------------------------------------------------------------------------------------------------


def part_of(value: Tensors, part: slice) -> Tensors:
    """Return some of the examples of a batch: a slice of each of several tensors, or of any other value itself."""
    if not _has_parts(value):
        return value[part]
    found: list[Tensor] = []
    structure = describe(value, found)
    return rebuild(structure, iter([one[part] for one in found]))


def examples_of(value: Tensors) -> int:
    """Return the number of examples of a batch; TypeError without examples, ValueError if its tensors differ."""
    if not _has_parts(value):
        return len(value)
    tensors: list[Tensor] = []
    try:
        describe(value, tensors)
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
            structure = json.dumps(describe(output, self._tensors))
        except TypeError as error:
            raise PipelineError(
                f"the stage returns a {error}: let its module return tensors, by themselves or in tuples, lists or "
                "dictionaries"
            ) from None
        if not self._tensors:
            raise PipelineError("the stage returns no tensor: let its module return the inputs of the next one")
        alone = structure == ONE
        # A mask needs no gradient. Where no tensor does, as in a slice that is not trained, all floats are activations.
        trained = any(one.requires_grad for one in self._tensors)
        fields = []
        for one in self._tensors:
            coded = alone or (not evaluating and one.dtype in CODED and (one.requires_grad or not trained))
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
            if (tensor.dtype not in CODED) if before.coded else (field.dtype != before.dtype):
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
    return rebuild(json.loads(layout.structure), iter(tensors)), coded


def as_rows(tensor: Tensor) -> Rows:
    """Return activations, or gradients, as they are coded."""
    return tensor.detach().to(torch.float32).resolve_neg().contiguous().numpy()


def as_bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor; of the tensor's own memory where it is contiguous."""
    found: Bytes = tensor_bytes(tensor).numpy()
    return found


def _is_like(output: Tensors, examples: int, field: TensorField) -> bool:
    """Return whether an output is the one coded tensor that was described before."""
    return isinstance(output, Tensor) and output.dtype in CODED and output.shape == (examples, *field.row_shape)


def _check(tensor: Tensor, examples: int, coded: bool) -> None:
    if (coded and tensor.dtype not in CODED) or (tensor.requires_grad and not coded):
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
