"""Events by which PyTorch's profilers show our calls, under names such as "mpicomp:all_reduce"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd.profiler import record_function
from torch.futures import Future


def begin_event(name: str) -> Callable[[], None] | None:
    """Begin an event if a profiler runs in this thread.

    Returns
    -------
    callable or None
        Ends the event, in whichever thread; None: no profiler runs.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    event = record_function(f"mpicomp:{name}")
    event.__enter__()  # type: ignore[no-untyped-call]
    ended: Future[None] = Future()
    event._call_end_callbacks_on_future(ended)  # which lets it end in another thread, where the call ends
    return partial(ended.set_result, None)
