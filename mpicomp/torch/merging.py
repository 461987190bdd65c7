"""What becomes of nested values that several ranks have: of parts of an optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives.quoting import listed, one_line, shown

CURE = "take states of one run, saved after the same step"
_COUNTER = "step"  # torch itself knows optimizers' counters by this name; they may be tensors of floats


def merge(where: str, values: Sequence[Any], averages: bool) -> Any:
    """Return what all ranks have in common.

    Parameters
    ----------
    where
        For the message.
    values
        Of the ranks, in order: tensors, numbers and the like, and dicts, lists and tuples of these.
    averages
        Whether floats that differ become their mean, taken in float64 and rounded once; entries named "step" do not.

    Raises
    ------
    ValueError
        The ranks have values that differ, and have no mean.
    """
    first = values[0]
    if all(isinstance(value, dict) for value in values):
        require_same_keys(one_line(where), values)
        return {
            key: merge(f"{where}[{key!r}]", [value[key] for value in values], averages and key != _COUNTER)
            for key in first
        }
    if isinstance(first, list | tuple) and all(type(one) is type(first) and len(one) == len(first) for one in values):
        return type(first)(merge(f"{where}[{i}]", one, averages) for i, one in enumerate(zip(*values, strict=True)))
    differing = next((rank for rank, value in enumerate(values) if not _same(value, first)), None)
    if differing is None:
        return first
    if averages and all(isinstance(value, float) for value in values):
        return sum(values) / len(values)
    if averages and all(map(_is_dense, values)):
        unlike = next((rank for rank, value in enumerate(values) if _form(value) != _form(first)), None)
        if unlike is None:
            return _mean(values)
        differing = unlike
    raise ValueError(
        f"ranks 0 and {differing} differ in {one_line(where)} ({_shown(first)} and {_shown(values[differing])}): {CURE}"
    )


def require_same_keys(where: str, values: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless the ranks' dicts have the same keys."""
    for rank, value in enumerate(values):
        if value.keys() != values[0].keys():
            raise ValueError(f"ranks 0 and {rank} have {listed(values[0])} and {listed(value)} in {where}: {CURE}")


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Taken in float64, rounded once."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor.detach()
    return total.div_(len(tensors)).to(tensors[0].dtype)


def _is_dense(value: Any) -> bool:
    return torch.is_tensor(value) and value.layout == torch.strided and value.is_floating_point()


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _same(one: Any, other: Any) -> bool:
    """Whether two leaves of states are equal; NaN is equal to NaN."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if not torch.is_tensor(one):
        return bool(one == other) or bool(one != one and other != other)
    if _form(one) != _form(other) or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        return bool(torch.equal(one, other))
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def _shown(value: Any) -> str:
    if torch.is_tensor(value) and value.numel() > 1:
        return f"{value.dtype}{list(value.shape)}"
    return shown(value)
