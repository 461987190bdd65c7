"""Tensors of batches and messages: cut into micro-batches, packed for a link, and made again from a message."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.pipeline.errors import PipelineError
from mpicomp.pipeline.layout import ONE, Field, Layout, describe, rebuild
from mpicomp.pipeline.link import Arrays

_CODED = (torch.float32, torch.float16, torch.bfloat16)  # as float32


def part_of(value: Any, part: slice) -> Any:
    """Return some of the examples of a batch: of each tensor, where there are several, or of anything else sliced."""
    if not _has_parts(value):
        return value[part]
    found: list[Tensor] = []
    structure = describe(value, Tensor, found)
    return rebuild(structure, iter([one[part] for one in found]))


def examples_of(value: Any) -> int:
    """Return the number of examples of a batch.

    Raises
    ------
    TypeError
        It has no examples along the first dimension of its tensors.
    ValueError
        Its tensors have different numbers of examples.
    """
    if not _has_parts(value):
        return len(value)
    tensors: list[Tensor] = []
    try:
        describe(value, Tensor, tensors)
    except TypeError as error:
        raise TypeError(f"a batch has a {error}: pass tensors in tuples, lists or dictionaries") from None
    if not tensors or not all(one.ndim for one in tensors):
        raise TypeError("a batch has no examples: pass tensors with an example in each row")
    sizes = {len(one) for one in tensors}
    if len(sizes) > 1:
        raise ValueError(f"the tensors of a batch have {', '.join(map(str, sorted(sizes)))} examples")
    return sizes.pop()


def _has_parts(value: Any) -> bool:
    """Return whether a batch is several tensors, each with all examples; lists are of examples."""
    return isinstance(value, dict) or (
        isinstance(value, tuple) and any(isinstance(one, Tensor | tuple | dict) for one in value)
    )


class Parcel:
    """The output of a slice as it travels.

    Parameters
    ----------
    output
        Of a slice's module.
    examples : int
    known : Layout or None
        That messages have had so far.
    evaluating : bool
        Several tensors are sent as their bytes: nothing comes back.

    Attributes
    ----------
    layout : Layout
    coded : list of Tensor
        Whose gradients come back.

    Raises
    ------
    PipelineError
        The output cannot be sent.
    """

    def __init__(self, output: Any, examples: int, known: Layout | None = None, evaluating: bool = False) -> None:
        self._tensors: list[Tensor] = []
        if known is not None and known.structure == ONE and _is_like(output, examples, known.fields[0]):
            # Nearly all micro-batches: describing them again takes 20 us each.
            self._tensors.append(output)
            self.layout, self.coded = known, self._tensors
            return
        try:
            structure = json.dumps(describe(output, Tensor, self._tensors))
        except TypeError as error:
            raise PipelineError(
                f"the stage returns a {error}: let its module return tensors, by themselves or in tuples, lists or "
                "dictionaries"
            ) from None
        if not self._tensors:
            raise PipelineError("the stage returns no tensor: let its module return what the next one takes")
        alone = structure == ONE
        # A mask needs no gradient. Where no tensor does, as in a slice that is not trained, all floats are activations.
        trained = any(one.requires_grad for one in self._tensors)
        fields = []
        for one in self._tensors:
            coded = alone or (not evaluating and one.dtype in _CODED and (one.requires_grad or not trained))
            _check(one, examples, coded)
            fields.append(Field(str(one.dtype).removeprefix("torch."), one.itemsize, tuple(one.shape[1:]), coded))
        self.layout = Layout(structure, tuple(fields))
        if known is not None:
            self._fit(known)
        self.coded = [one for one, field in zip(self._tensors, self.layout.fields, strict=True) if field.coded]

    def _fit(self, known: Layout) -> None:
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

    def message(self) -> tuple[Layout, Arrays]:
        """Return the message for a link."""
        pairs = zip(self._tensors, self.layout.fields, strict=True)
        return self.layout, [as_rows(one) if field.coded else _as_bytes(one) for one, field in pairs]


def arrived(layout: Layout, arrays: Arrays) -> tuple[Any, list[Tensor]]:
    """Return the value that a neighbour has sent, and its tensors whose gradients go back."""
    if layout.structure == ONE:
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


def _is_like(output: Any, examples: int, field: Field) -> bool:
    """Return whether an output is the one coded tensor that was described before."""
    return isinstance(output, Tensor) and output.dtype in _CODED and output.shape == (examples, *field.row_shape)


def as_rows(tensor: Tensor) -> NDArray[np.float32]:
    """Return activations, or gradients, as they are coded."""
    return tensor.detach().to(torch.float32).resolve_neg().contiguous().numpy()


def _as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    found: NDArray[np.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return found


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
