"""Steps of a wrapped optimizer that its wrapper does not make: they take averaged gradients, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils.hooks import RemovableHandle

from collectives.execution.uncompiled import keep_uncompiled


class InnerSteps:
    """Hook before each step of an optimizer, and context manager for the steps that its wrapper makes.

    The wrappers of one optimizer share it, and the latest one decides about other steps, as long as it lives. A copy,
    or a pickle, of an optimizer has a hook that does nothing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._latest: WeakMethod[Callable[[str], None]] | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def __reduce__(self) -> tuple[type[InnerSteps], tuple[()]]:
        return InnerSteps, ()

    @keep_uncompiled
    def __call__(self, optimizer: object, *_: object) -> None:
        """Have the step admitted that the optimizer is about to make."""
        self._admit(f"{type(optimizer).__name__}.step()")

    def guard(self, name: str, attribute: Any) -> Any:
        """Return an attribute of the optimizer, each call of which counts as a step if it is a method."""
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*arguments: Any, **options: Any) -> Any:
            self._admit(f"{name}()")
            with self:
                return attribute(*arguments, **options)

        return call

    def _admit(self, call: str) -> None:
        if not self._depth and self._latest is not None and (admit := self._latest()) is not None:
            admit(call)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, admit: Callable[[str], None]) -> InnerSteps:
        """Return the hook of an optimizer, and of those over its parameters to which it delegates, as SAM does.

        The method `admit`, referred to weakly, raises an error for a call that must not step.
        """
        held = _parameters_of(optimizer)
        # optimizers that do not run torch's __init__ have no hooks
        hooked = [one for one in (optimizer, *vars(optimizer).values()) if hasattr(one, "_optimizer_step_pre_hooks")]
        hooks = [one._optimizer_step_pre_hooks for one in hooked if held & _parameters_of(one)]
        steps = next((hook for of_one in hooks for hook in of_one.values() if isinstance(hook, cls)), None) or cls()
        steps._latest = WeakMethod(admit)
        for of_one in (one for one in hooks if steps not in one.values()):
            of_one[RemovableHandle(of_one).id] = steps
        return steps


def _parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
