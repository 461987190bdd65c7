"""Tensors of a model by name, as calls take them: without those that are left out, and checked on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor

from collectives import Communicator
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.torch.devices import require_reachable

Exclude: TypeAlias = str | Iterable[str]
"""Names of tensors that a call leaves out, or patterns of names."""


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name, those buffers included that its state leaves out."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def leave_out(named: Mapping[str, Tensor], exclude: Exclude) -> dict[str, Tensor]:
    """Return the tensors whose names fit none of the patterns.

    Raises
    ------
    ValueError
        A pattern fits no name: a misspelt one would have tensors overwritten that are to be left alone.
    """
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(f"exclude has {pattern!r}, which fits no name; pass names such as {', '.join(named):.80}")
    return {name: one for name, one in named.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)}


def checked_tensors(
    named: Any, comm: Communicator, call: str, usage: str, exclude: Exclude = (), overwritten: bool = True
) -> dict[str, Tensor]:
    """Return the dense tensors that a call compares, or that are `overwritten`, without those to leave out.

    Raises
    ------
    TypeError, ValueError
        This rank's cannot be used; the others then raise CollectiveMismatch.
    """
    require_communicator(comm, call, usage, named)
    with comm.refusing(call, TypeError, ValueError):
        if not isinstance(named, Mapping):
            raise TypeError(f"a {type(named).__name__} has no tensors by name; pass a module or its state_dict()")
        kept = leave_out(named, exclude)
        for name, tensor in kept.items():
            if not torch.is_tensor(tensor):
                raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor; leave it out")
            require_reachable(f"parameter {name!r}", tensor)
            if tensor.layout != torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else str(tensor.layout)
                raise ValueError(f"{name!r} is a {kind} tensor; make it dense, or leave it out")
            shape = zip(tensor.stride(), tensor.shape, strict=True)
            if overwritten and tensor.numel() and any(not stride and size > 1 for stride, size in shape):
                raise ValueError(f"{name!r} is expanded, so that elements share memory; pass tensor.contiguous()")
    return kept
