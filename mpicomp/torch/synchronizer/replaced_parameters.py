"""Parameters that a module has replaced since an optimizer was made of them: they would stand still on this rank.

``model.weight = nn.Parameter(...)`` and ``load_state_dict(assign=True)`` register the new parameter in the module, and
PyTorch calls a hook before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from mpicomp.torch.parameters import NamedParameter
from mpicomp.torch.synchronizer.gradient_hooks import GradientCounts

_watches: list[weakref.ref[ReplacedParameters]] = []


class ReplacedParameters:
    """Those of the `members`, a list that may grow, that a module has replaced and not taken back."""

    def __init__(self, members: Sequence[NamedParameter]) -> None:
        self._members = members
        self.found: set[Tensor] = set()
        _watches.append(weakref.ref(self, _watches.remove))

    def note(self, before: Tensor | None, after: Tensor | None) -> None:
        """Take note of a parameter that takes the place of another one."""
        self.found.discard(after)
        if before is not None and any(member.parameter is before for member in self._members):
            self.found.add(before)

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


def _note(module: torch.nn.Module, name: str, after: torch.nn.Parameter | None) -> None:
    before = module._parameters.get(name)
    for one in () if before is after else [*_watches]:
        if (watch := one()) is not None:
            watch.note(before, after)


register_module_parameter_registration_hook(_note)
