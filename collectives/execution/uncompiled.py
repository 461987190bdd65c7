"""Functions that torch.compile leaves as they are.

Communication has effects that no graph holds. A compiler that traced these functions would replace NumPy by tensors,
record addresses and counters as constants, and run hooks in an order of its own. PyTorch is not imported here. Where it
has not loaded its compiler, a function runs without detour.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class")
_COMPILER, _CALLBACKS = "torch._dynamo", "torch._C._dynamo.eval_frame"
_REASON = (
    "it communicates, or keeps account of what was communicated, which no graph can hold: compile the model or the "
    "function that computes the loss, and leave this call outside, or compile without fullgraph=True"
)


def keep_uncompiled(function: _Function) -> _Function:
    """Return `function` as a function that `torch.compile` neither traces nor compiles, with all that it calls."""
    disabled: Callable[..., Any] | None = None
    compiler_of_thread: Callable[[], object] = _none

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled, compiler_of_thread
        if disabled is None:
            if _COMPILER not in sys.modules:  # whose import takes a second, and which has nothing to compile yet
                return function(*args, **kwargs)
            compiler_of_thread, disabled = _lookup(), sys.modules["torch"].compiler.disable(function, reason=_REASON)
        if compiler_of_thread() is None:  # spares the 1 to 2 us of the other way
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    marked: Any = run  # as torch.compiler.disable would mark it, so that a graph ends before the call
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    return cast(_Function, run)


def _none() -> None:
    return None


def _lookup() -> Callable[[], object]:
    """Return a function that returns None except where PyTorch compiles or runs compiled code in this thread."""
    found: Callable[[], object] = getattr(sys.modules.get(_CALLBACKS), "get_eval_frame_callback", object)
    return found  # where a release has it elsewhere, `object`, which is always something


def keep_methods_uncompiled(cls: type[_Class]) -> type[_Class]:
    """Apply `keep_uncompiled` to the functions and properties of a class, special methods left out."""
    for name, member in tuple(vars(cls).items()):
        if name.startswith("__"):
            continue
        if isinstance(member, FunctionType):
            setattr(cls, name, keep_uncompiled(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, property(keep_uncompiled(member.fget), member.fset, member.fdel))
    return cls
