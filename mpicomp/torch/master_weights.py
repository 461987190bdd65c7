"""Float32 master copies of 16-bit parameters, for optimizers that move the model before it is synchronized.

An update is often smaller than half the spacing of 16-bit floats, so ``p - lr * g`` would round back to ``p`` and
nothing would be left to average. The wrapped optimizer therefore moves float32 masters; the model holds them rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpicomp.torch.buckets import NamedParameter

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_MARK = "_mpicomp_master"


def is_master(parameter: Tensor) -> bool:
    """Whether this is the master of some parameter."""
    return hasattr(parameter, _MARK)


class MasterWeights:
    """Replaces every 16-bit parameter of an optimizer by a float32 master.

    `optimizer.param_groups` is edited in place and the parameters' optimizer state, if any, moves to the masters.

    Attributes
    ----------
    parameters
        The model's 16-bit parameters.
    masters
        Their float32 masters, which the optimizer now holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._taken: list[tuple[Tensor | None, int]] = []  # gradients of the model, and their versions
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter.dtype in SIXTEEN_BIT and parameter.requires_grad:
                    master = torch.nn.Parameter(parameter.detach().float())
                    setattr(master, _MARK, True)
                    group["params"][i] = master
                    self.parameters.append(parameter)
                    self.masters.append(master)
                    if parameter in optimizer.state:
                        optimizer.state[master] = {
                            key: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
                            for key, value in optimizer.state.pop(parameter).items()
                        }

    def substitute(self, members: Sequence[NamedParameter]) -> list[NamedParameter]:
        """`members` with each 16-bit parameter replaced by its master, under its name."""
        masters = dict(zip(self.parameters, self.masters, strict=True))
        return [NamedParameter(m.name, masters.get(m.parameter, m.parameter)) for m in members]

    def original(self, parameter: Tensor) -> Tensor:
        """The model's parameter whose master this is, or the parameter itself."""
        return next(
            (p for p, master in zip(self.parameters, self.masters, strict=True) if master is parameter), parameter
        )

    def take_gradients(self) -> None:
        """Give each master its parameter's gradient, in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self._taken = self._gradients()

    @property
    def gradients_changed(self) -> bool:
        """Flag: gradients of the model were changed after the masters had taken them, which then lack the change."""
        pairs = zip(self._gradients(), self._taken, strict=True)
        return any(now is not before or version != then for (now, version), (before, then) in pairs)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        gradients = [parameter.grad for parameter in self.parameters]
        return [(one, 0 if one is None else one._version) for one in gradients]

    def drop_gradients(self, set_to_none: bool) -> None:
        """Clear the model's gradients; the masters' follow with the next `take_gradients`."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over parameters that were written since `publish`, for instance by loading a model."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            unchanged = master.to(parameter.dtype) == parameter
            master.copy_(torch.where(unchanged, master, parameter.float()))

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
