"""Modes of the caller, such as ``torch.inference_mode()``, that must not reach tensors that outlive the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from collectives.execution.uncompiled import keep_uncompiled

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_own_mode(function: _Function) -> _Function:
    """Return `function` as one that `torch.compile` leaves alone, and that inference mode reaches as `no_grad` would.

    States that are made at first use live on, and a tensor made in inference mode can be written in that mode alone.
    """

    @keep_uncompiled
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # the former enables gradients
            return function(*args, **kwargs)

    return cast(_Function, run)
