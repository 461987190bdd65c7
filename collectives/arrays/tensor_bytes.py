"""Bytes of a PyTorch tensor, whichever its strides."""

from __future__ import annotations

import sys

from collectives.annotations import Tensor


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor's elements in C order: its own memory where that is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # as_strided: a tensor of one element counts as contiguous with any stride, and `view` refuses strides but 1
    return plain.as_strided((plain.numel(),), (1,)).view(sys.modules["torch"].uint8)
