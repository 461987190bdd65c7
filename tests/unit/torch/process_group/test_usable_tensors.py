"""Checks of tensors before a call: values to read, and elements with memory of their own to write."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpicomp.torch.process_group.usable_tensors import require_usable


def test_tensors_whose_elements_share_memory_are_refused_and_no_others() -> None:
    memory = torch.zeros(64)
    for shape in itertools.product(range(4), repeat=3):
        for stride in itertools.product((0, 1, 2, 3, 4, 7), repeat=3):
            tensor = memory.as_strided(shape, stride)
            places = [
                sum(a * b for a, b in zip(place, stride, strict=True))
                for place in itertools.product(*map(range, shape))
            ]
            require_usable([], [tensor])
            if len(set(places)) == len(places):
                require_usable([tensor], [])
            else:
                with pytest.raises(ValueError, match=r"share memory, as after expand\(\).*pass tensor.contiguous"):
                    require_usable([tensor], [])


def test_views_of_memory_that_was_freed_are_refused() -> None:
    tensor = torch.zeros(8)[4:]
    require_usable([tensor], [])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"the memory of the tensor of shape \[4\] was freed"):
        require_usable([], [tensor])


def test_parameters_and_plain_subclasses_are_taken() -> None:
    class Named(torch.Tensor):
        pass

    require_usable([torch.nn.Parameter(torch.zeros(2)), torch.zeros(2).as_subclass(Named)], [])
