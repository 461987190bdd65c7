"""Checks of the tensors of a call, before anything is sent: an error in the progress thread would end the group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_UNWRAPPED = {"DTensor": "tensor.to_local()", "AsyncCollectiveTensor": "tensor.wait()"}


def require_usable(written: Sequence[Tensor], read: Sequence[Tensor], writes: bool = True) -> None:
    """Raise TypeError or ValueError unless all tensors have values, and results can be written to those that are."""
    for tensor in (*written, *read):
        _require_plain(tensor)
    for tensor in written if writes else ():
        if tensor.layout == torch.strided and not tensor.is_contiguous() and _shares_elements(tensor):
            raise ValueError(
                f"elements of the tensor of shape {list(tensor.shape)} share memory, as after expand(), and a result "
                "cannot be written there: pass tensor.contiguous()"
            )


def _require_plain(tensor: Tensor) -> None:
    """Raise TypeError or ValueError unless the tensor has memory of its own, with its values."""
    kind = type(tensor)
    plain = kind is Tensor or kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    if not plain and (tensor.is_cpu or is_traceable_wrapper_subclass(tensor)):
        cure = _UNWRAPPED.get(kind.__name__, "a plain tensor")
        raise TypeError(f"the tensor is of type {kind.__name__}, which wraps others: pass {cure}")
    if tensor.is_nested:
        raise ValueError("the tensor is nested: pass its parts, tensor.unbind(), one by one")
    if tensor.layout == torch.strided and tensor.numel() and not (tensor.is_meta or tensor.untyped_storage().nbytes()):
        raise ValueError(f"the memory of the tensor of shape {list(tensor.shape)} was freed: pass one that has values")


def _shares_elements(tensor: Tensor) -> bool:
    end, nested = 1, True  # elements from the first one to the last one of the dimensions up to here
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        nested &= size == 1 or stride >= end
        end += (size - 1) * stride
    if nested:
        return False
    marks = np.zeros(end, np.bool_)
    as_strided(marks, tensor.shape, tensor.stride())[...] = True
    return bool(marks.sum() < tensor.numel())


def require_dense(tensors: Sequence[Tensor], mixed_dtypes: bool = False) -> None:
    """Raise TypeError or ValueError unless all are dense tensors in host memory."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise ValueError(f"the tensor is {kind} of {tensor.dtype}: pass a dense one")
        if tensor.device.type != "cpu":
            raise ValueError(
                f"the tensor is on {tensor.device}, and this backend takes tensors on the CPU and on GPUs: pass "
                "tensor.cpu()"
            )
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 and not mixed_dtypes:
        raise TypeError(f"the tensors differ in dtype: {', '.join(sorted(map(str, dtypes)))}")
