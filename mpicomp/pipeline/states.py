"""States as ``torch.load`` reads them with its defaults: tensors in place of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def with_tensors(state: Any) -> Any:
    """Return a state with tensors for arrays, which share their memory."""
    if isinstance(state, np.ndarray):
        # PyTorch 2.13 does not unpickle tensors of uint32. Stores take stamps of int32 back.
        return torch.from_numpy(state.view(np.int32) if state.dtype == np.uint32 else state)
    if isinstance(state, Mapping):
        return {key: with_tensors(one) for key, one in state.items()}
    return [with_tensors(one) for one in state] if isinstance(state, list | tuple) else state


def with_arrays(state: Any) -> Any:
    """Return a state with arrays for tensors, which share their memory; arrays of older states are left as they are."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().numpy()
    if isinstance(state, Mapping):
        return {key: with_arrays(one) for key, one in state.items()}
    return [with_arrays(one) for one in state] if isinstance(state, list | tuple) else state
