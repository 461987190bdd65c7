"""Entries of optimizers' states that have a mean over ranks: those that are linear in gradients, or in their squares.

The mean of codes times the mean of their scales is not the mean of the numbers that they encode. So an entry whose
values differ between ranks has a mean only if it is known to be linear: by the name that optimizers of PyTorch and
Transformers give it, or by full precision and the parameter's shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

COUNTER = "step"
"""Name of counters, by which torch itself distinguishes them; they may be tensors of floats."""

# Of torch.optim: in the parameter's shape, and in 16 bits where the parameter is.
_ELEMENTWISE = frozenset((
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta",
    "sum", "ax", "prev", "step_size", "variance",
))  # fmt: skip
# Means of squares over rows, columns or a whole parameter, of Adafactor and NovoGrad. Transformers' Adafactor computes
# RMS again before it reads it.
_REDUCED = frozenset(["row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "RMS"])
_FULL = (torch.float32, torch.float64)
_ANY = (*_FULL, torch.float16, torch.bfloat16)


class LinearEntries:
    """Entries of one parameter's state.

    Parameters
    ----------
    shape : sequence of int or None
        The parameter's; None: not known.

    Attributes
    ----------
    refused : list of str
        Entries without a mean, with values of two ranks.
    """

    def __init__(self, shape: Sequence[int] | None) -> None:
        self._shape = shape
        self.refused: list[str] = []

    def contain(self, key: object, value: Any) -> bool:
        """Return True if a value has a mean over ranks, by the key of its entry."""
        if isinstance(value, float):
            return key in _REDUCED
        # a subclass may hold codes, also one whose dtype is float32
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return False
        if key in _REDUCED:
            return value.dtype in _ANY
        return value.dtype in (_ANY if key in _ELEMENTWISE else _FULL) and [*value.shape] == self._shape

    def check(self) -> None:
        """Raise ValueError if an entry has no mean."""
        if self.refused:
            raise ValueError(
                f"ranks differ in {' and in '.join(self.refused[:3])}, whose mean may be wrong: have the optimizer's "
                "state_dict return them decoded, in float32 and in the parameter's shape, and scales as 1 "
                "(register_state_dict_post_hook), or go on with as many ranks"
            )


def shape_of_parameter(shapes: Any, index: Any, state: Any) -> Any:
    """Return the shape of a parameter from the `shapes` in a state, or that of its largest tensor in an older state."""
    if isinstance(shapes, list) and isinstance(index, int) and 0 <= index < len(shapes):
        return shapes[index]
    entries = state.values() if isinstance(state, dict) else ()
    return max(([*one.shape] for one in entries if isinstance(one, Tensor)), key=math.prod, default=None)
