"""Warnings that name the line of the user's program, however many frames of this library lie between."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_caller"]

# packages between a user's line and a warning: PyTorch wraps an optimizer's `step`, Numba compiles in a first call
_PASSED = {"collectives", "contextlib", "functools", "mpicomp", "numba", "torch"}


def warn_caller(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning at the line that called this library, PyTorch or a thread's work.

    Parameters
    ----------
    message : str
        Text of the warning.
    category : type, default RuntimeWarning
        Class of the warning.
    """
    frame, level = sys._getframe(), 1  # `stacklevel` counts this function's frame as the first
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
