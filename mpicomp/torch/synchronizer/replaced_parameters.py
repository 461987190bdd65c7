"""Parameters that a module has replaced since an optimizer was made of them: they would stand still on this rank.

``model.weight = nn.Parameter(...)`` and ``load_state_dict(assign=True)`` register the new parameter in the module, and
``model.head = nn.Linear(...)`` a module with new ones. PyTorch calls a hook before.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.synchronizer.gradient_hooks import GradientCounts

_watches: list[weakref.ref[ReplacedParameters]] = []


class ReplacedParameters:
    """Those of the `members`, a list that may grow, that a module has replaced and not taken back."""

    def __init__(self, members: Sequence[NamedParameter]) -> None:
        self._members = members
        self.found: set[Tensor] = set()
        _watches.append(weakref.ref(self, _watches.remove))

    def note(self, before: Collection[Tensor], after: Collection[Tensor]) -> None:
        """Take note of parameters that take the places of other ones."""
        self.found |= {member.parameter for member in self._members if member.parameter in before}
        self.found -= {*after}

    def find(self, counts: GradientCounts) -> str:
        """Return, with its cure, one of these parameters without a gradient in this step; or an empty string."""
        for position, member in enumerate(self._members if self.found or not counts.any_came else ()):
            parameter = member.parameter
            if parameter in self.found and parameter.requires_grad and counts.lacks(position):
                return (
                    f"parameter {member.name!r} was replaced in its module after the optimizer was made: make both "
                    "optimizers again, or freeze the old one, which this one holds, by requires_grad_(False)"
                )
            # has the hooks called again that PyTorch leaves behind where a module swaps its tensors
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        return ""


def _note(module: torch.nn.Module, name: str, after: torch.nn.Module | Tensor | None) -> None:
    before = module._parameters.get(name, module._modules.get(name))
    for one in () if before is after else [*_watches]:
        if (watch := one()) is not None:
            watch.note(_parameters_in(before), _parameters_in(after))


def _parameters_in(one: torch.nn.Module | Tensor | None) -> set[Any]:
    return {*one.parameters()} if isinstance(one, torch.nn.Module) else {one}


register_module_parameter_registration_hook(_note)
register_module_module_registration_hook(_note)
