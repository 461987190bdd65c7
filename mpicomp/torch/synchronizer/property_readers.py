"""Functions of PyTorch that read an optimizer's properties, found by the frames of their callers."""

from __future__ import annotations

import sys
from itertools import islice
from traceback import walk_stack

from collectives import Communicator

_INITIALIZES = "_init_optim_state"
"""Function of `torch.distributed.checkpoint` that reads an optimizer's state before it saves, loads or steps."""
_UNSCALES = "_unscale_grads_"
"""The function of GradScaler that reads the parameter groups only to look for infinities in the gradients."""
_MOST_FRAMES = 5
"""Frames between a property of the optimizer and its caller, at most."""


def refuse_distributed_checkpoint(comm: Communicator) -> None:
    """Raise RuntimeError if `torch.distributed.checkpoint` reads the property that calls this function."""
    if sys._getframe(2).f_code.co_name == _INITIALIZES:
        raise RuntimeError(
            f"{comm.here}: torch.distributed.checkpoint leaves out this rank's residuals and counters, as it knows "
            "an optimizer's 'state' and 'param_groups' alone; save optimizer.state_dict() to a file of each rank, and "
            "load it by optimizer.load_state_dict"
        )


def is_read_by_scaler() -> bool:
    """Return True if the calling property is read by a GradScaler that is about to unscale gradients.

    Wrappers of `in_own_mode` lie between the property and its reader.
    """
    frames = islice(walk_stack(sys._getframe(2)), _MOST_FRAMES)
    return any(frame.f_code.co_name == _UNSCALES for frame, _ in frames)
