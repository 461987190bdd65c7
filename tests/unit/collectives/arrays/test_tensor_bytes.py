"""Bytes of tensors with any strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collectives.arrays.tensor_bytes import tensor_bytes

MATRIX = torch.arange(35.0).reshape(7, 5)
TENSORS = {
    "contiguous": MATRIX,
    "transposed": MATRIX.t(),
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "one element, stride 7": torch.arange(7.0)[::7],
    "one element, two dimensions": MATRIX.t()[:1, :1],
    "no element, stride 2": torch.arange(4.0)[::2][:0],
    "expanded": torch.ones(5, 1).expand(5, 4),
    "channels last": torch.arange(16.0).reshape(2, 2, 2, 2).to(memory_format=torch.channels_last),
    "conjugated": torch.full((3,), 1 + 2j).conj(),
    "negated": torch.full((3,), 1 + 2j).conj().imag,
    "requires a gradient": torch.nn.Parameter(MATRIX.t()),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_bytes_are_those_of_the_elements_in_c_order(tensor: Tensor) -> None:
    plain = tensor.detach().resolve_conj().resolve_neg().numpy()
    assert tensor_bytes(tensor).numpy().tobytes() == plain.tobytes("C")


def test_bytes_of_a_contiguous_tensor_are_its_own_memory() -> None:
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    tensor_bytes(tensor).zero_()
    assert not tensor.any()
